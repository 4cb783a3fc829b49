"""Script that gives out deliveries of webhooks (bus/webhooks.py)."""

from __future__ import annotations

from tokenbus.bus.scripts.script import ScriptCall, script


@script()
def due(due: str, bodies: str, *, most: int, lease_ms: int) -> ScriptCall:
    """Take up to ``most`` deliveries whose time has come; each is due again after ``lease_ms``, should this worker be
    lost. A delivery whose body is gone is forgotten.

    Reply: in how many ms the next one is due, -1 if there is none; how many there are; then id and body of each.
    """
    ...

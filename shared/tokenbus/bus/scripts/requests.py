"""The script that clients publish requests with."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.keys import DATA_FIELD, TENANT_FIELD
from tokenbus.bus.scripts.script import Arg, ScriptCall, script


@script(DATA_FIELD=DATA_FIELD, TENANT_FIELD=TENANT_FIELD)
def publish(stream: str, *, requests: Sequence[Arg]) -> ScriptCall:
    """Append requests to the inbound stream while it has room. ``requests``: of each the longest length of the stream,
    its bytes, and its tenant or ``""``. Reply: the id of each entry, None if the stream is full.
    """
    ...

"""Decides which runs are recorded: those that ask for it, and a sample of the others. Pure and deterministic per
run.
"""

from __future__ import annotations

from hashlib import sha256

from tokenbus.events.requests import Generate
from tokenbus_services.intake.settings_match import meets
from tokenbus_services.settings import RecordSettings


def is_recorded(run: str, request: Generate, settings: RecordSettings | None) -> bool:
    """Whether this run is recorded. The request's own setting takes precedence."""
    if settings is None or request.record is not None:
        return bool(settings and request.record)
    return meets(request, settings) and _place(run) < settings.sample


def _place(run: str) -> float:
    """Map a run id uniformly to [0, 1), independently of its partition."""
    return int.from_bytes(sha256(run.encode()).digest()[:6]) / 2**48

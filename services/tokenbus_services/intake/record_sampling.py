"""Which runs are recorded: those that ask for it, and a share of the others. Pure, and for a run always the same."""

from __future__ import annotations

from hashlib import sha256

from tokenbus.events.requests import Generate
from tokenbus_services.intake.request_match import meets
from tokenbus_services.settings import RecordSettings


def is_recorded(run: str, request: Generate, settings: RecordSettings | None) -> bool:
    """Whether this run is recorded. The request's own word comes first."""
    if settings is None or request.record is not None:
        return bool(settings and request.record)
    return meets(request, settings) and _place(run) < settings.sample


def _place(run: str) -> float:
    """From 0 up to 1, evenly over runs; has nothing to do with the run's partition."""
    return int.from_bytes(sha256(run.encode()).digest()[:6]) / 2**48

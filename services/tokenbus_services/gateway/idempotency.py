"""Requests with an `Idempotency-Key`: the run's id follows from the key, so a retry meets the first try's run. Pure."""

from __future__ import annotations

from hashlib import sha256

from tokenbus.events.public import Cancelled, Incomplete, PublicEvent, RunFailedEvent
from tokenbus_services.gateway.problem import Problem, Refusal

HEADER = "idempotency-key"
MAX_KEY_CHARS = 256


def run_of(tenant: str, key: str, surface: str) -> str:
    """The run of all requests of a tenant with this key. Raises Refusal if the key is too long or empty."""
    if not 0 < len(key) <= MAX_KEY_CHARS:
        why = f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters"
        raise Refusal(
            Problem(status=400, code="invalid_value", message=why, kind="invalid_request", param="Idempotency-Key")
        )
    parts = "".join(f"{len(part)}:{part}" for part in (tenant, key, surface))
    return f"gw-{sha256(parts.encode()).hexdigest()[:32]}"


def hash_of(body: bytes) -> str:
    """A digest of the body, to compare it with the body of a later request."""
    return sha256(body).hexdigest()[:32]


def mismatch(run: str) -> Refusal:
    """The same key was used with another body."""
    why = "this Idempotency-Key was used with another request body"
    return Refusal(Problem(status=422, code="idempotency_mismatch", message=why, kind="invalid_request", run=run))


def may_be_retried(end: PublicEvent) -> bool:
    """Whether a request under the key of a run that ended so begins another run."""
    match end:
        case Cancelled():
            return True
        case RunFailedEvent(error=error):
            return error.retryable
        case Incomplete(error=error):
            return error is None or error.retryable
        case _:
            return False

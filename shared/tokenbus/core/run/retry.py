"""What follows when an attempt did not finish: pure, and the same on every replay."""

from __future__ import annotations

from zlib import crc32

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import RunLimits
from tokenbus.events.requests import OnFailure

WORKER_LOST = "worker_lost"
"""Code of the error of an attempt whose worker died, was frozen or shut down."""


def decide(
    error: ErrorInfo,
    *,
    policy: OnFailure,
    heard: bool,
    failures: int,
    losses: int,
    rules: RunLimits,
    salt: str,
) -> int | None:
    """After how many ms to try the turn again; None: the run ends.

    ``heard``: something visible of this turn left the bus, and the next attempt cannot go on from it. ``failures``
    and ``losses`` count this turn's attempts so far, the present one included. ``salt`` spreads the delays of runs
    that failed together. A provider's wish (Retry-After) is the least delay; where it is longer than the longest
    delay, waiting would only look like a hang, and the run ends.
    """
    if policy == "fail" or not error.retryable or (heard and policy != "restart"):
        return None
    if error.code == WORKER_LOST:
        return 0 if losses <= rules.max_losses else None
    if failures >= rules.max_attempts:
        return None
    asked_ms = round((error.retry_after_s or 0) * 1000)
    if asked_ms > rules.max_delay_ms:
        return None
    ceiling = min(rules.base_delay_ms * 2 ** min(failures - 1, 20), rules.max_delay_ms)
    # Half fixed, half spread, as "equal jitter" (AWS, Exponential Backoff And Jitter); from a hash, not from chance.
    spread = crc32(f"{salt}:{failures}".encode()) % (ceiling // 2 + 1)
    return max(asked_ms, ceiling // 2 + spread)


def another_may_do_better(error: ErrorInfo) -> bool:
    """Whether to ask another provider after this error of an attempt: not for a fault of the bus itself, nor for media
    that nobody can load."""
    return error.kind not in ("internal", "tool") and not error.code.startswith("blob_")

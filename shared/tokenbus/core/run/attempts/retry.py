"""Retry decision after an unfinished attempt: pure, and equal in every replay."""

from __future__ import annotations

from zlib import crc32

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import RunLimits
from tokenbus.events.requests import OnFailure

WORKER_LOST = "worker_lost"
"""Error code of an attempt whose worker died, froze or shut down."""
PROMPT_LOSSES = 2
"""So many lost attempts of a turn are retried at once: workers are replaced one after the other. Later ones are delayed
as after an error: if the turn itself kills its workers, others must be able to finish their runs in between.
"""


def decide(
    error: ErrorInfo,
    *,
    policy: OnFailure,
    visible_emitted: bool,
    failures: int,
    losses: int,
    rules: RunLimits,
    salt: str,
) -> int | None:
    """Delay in ms before the turn is retried; None: the run ends.

    ``visible_emitted``: visible output of this turn has left the bus, and the next attempt cannot continue it.
    ``failures`` and ``losses`` count this turn's attempts so far, including this one. ``salt`` spreads the delays of
    runs that failed together. A provider's Retry-After is the minimum delay. If it exceeds the maximum delay, the run
    ends, because such a wait would look like a hang.
    """
    if policy == "fail" or not error.retryable or (visible_emitted and policy != "restart"):
        return None
    if error.code == WORKER_LOST:
        if losses > rules.max_losses:
            return None
        return _backoff_ms(losses - PROMPT_LOSSES, rules, salt) if losses > PROMPT_LOSSES else 0
    if failures >= rules.max_attempts:
        return None
    asked_ms = round((error.retry_after_s or 0) * 1000)
    if asked_ms > rules.max_delay_ms:
        return None
    return max(asked_ms, _backoff_ms(failures, rules, salt))


def _backoff_ms(tries: int, rules: RunLimits, salt: str) -> int:
    ceiling = min(rules.base_delay_ms * 2 ** min(tries - 1, 20), rules.max_delay_ms)
    # Half fixed, half random: "equal jitter" (AWS, Exponential Backoff And Jitter), from a hash so that replays agree.
    spread = crc32(f"{salt}:{tries}".encode()) % (ceiling // 2 + 1)
    return ceiling // 2 + spread


def fallback_may_succeed(error: ErrorInfo) -> bool:
    """Whether another provider may succeed after this error: not for faults of the bus itself, nor for unloadable
    media.
    """
    return error.kind not in ("internal", "tool") and not error.code.startswith("blob_")

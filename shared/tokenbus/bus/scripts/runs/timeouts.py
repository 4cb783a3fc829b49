"""Timeouts that the parser's clock sends to a run: its deadline has passed, or no worker processes it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tokenbus.bus.scripts.script import ScriptCall, script

RunIs: TypeAlias = Literal["open", "abandoned", "ended", "not ended"]
"""A run's state by its hash: the run may be written to, its keys are gone or refuse all writes, it has ended, or any
but that."""


@script()
def expire(
    run_key: str,
    events: str,
    raw: str,
    control: str,
    parser_lease: str,
    normalizer_lease: str,
    *,
    run: str,
    frame: bytes,
    control_frame: bytes,
) -> ScriptCall:
    """Expire an open run whose deadline has passed: refuse further writes of its attempt, notify its workers, and let
    the parser end it.

    Reply: ``expiring``; the run's status if it is no longer open (nothing is written then); ``gone`` if its keys have
    expired: the parser may still have the run and is notified.
    """
    ...


@script()
def append_timeout(
    run_key: str, events: str, parser_lease: str, *, run: str, frame: bytes, only_if: RunIs = "open"
) -> ScriptCall:
    """Append an event of the parser's own to `events`: 1, or 0 if the run's hash does not say what it must. Fences
    nothing; the parser may find that the event does not apply.
    """
    ...


@script()
def lose_attempt(
    run_key: str,
    raw: str,
    control: str,
    normalizer_lease: str,
    *,
    run: str,
    attempt: int,
    frame: bytes,
    control_frame: bytes,
) -> ScriptCall:
    """Close an attempt whose work is in no queue: refuse its further writes, notify its fetcher, and let the parser
    decide what follows, as for a lost worker.

    Reply: ``lost``; ``closed`` if its last frame was written; else nothing is written, and it is not the run's present
    attempt: ``gone``, the run's status, or ``attempt N``.
    """
    ...


@script()
def read_policy_stage(policy_lease: str) -> ScriptCall:
    """State of the policy stage in a partition: whether a worker owns it (1 or 0), its unread bytes, and its committed
    offset.
    """
    ...

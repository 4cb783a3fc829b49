"""Messages between a policy worker and its executors."""

from __future__ import annotations

import msgspec

from tokenbus.events.frames import PolicyVerdict
from tokenbus.policy.loading import PolicySpec

MESSAGE_BYTES = 2**28
"""The longest message of an executor."""


class PolicyWork(msgspec.Struct, frozen=True, kw_only=True):
    """What executors of policies do."""

    policies: dict[str, PolicySpec]
    calls: int
    """Maximum concurrent policy calls in one executor."""
    report_waiting_s: float
    redis_url: str
    prefix: str
    partitions: int
    run_ttl_ms: int


class Failing(msgspec.Struct, frozen=True, array_like=True):
    """A policy that is no longer called: its calls fail."""

    since: int
    """From this place on."""
    reason: str


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Judge a run, from its first draft on."""

    task: int
    run: str
    policies: tuple[str, ...]
    failing: dict[str, Failing] = {}


class Feed(msgspec.Struct, frozen=True, array_like=True, tag="feed"):
    """Further drafts of the run, in their original frames."""

    task: int
    frames: list[bytes]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The run needs no more verdicts."""

    task: int


ToExecutor = Open | Feed | Close


class Verdicts(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """Verdicts of a run's policies."""

    task: int
    seen: int
    """How many of the run's drafts they have seen."""
    steps: list[PolicyVerdict]


class WaitingForSlot(msgspec.Struct, frozen=True, array_like=True, tag="waits"):
    task: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """All of the run has been judged, or its policies ended it."""

    task: int


class Defect(msgspec.Struct, frozen=True, array_like=True, tag="defect"):
    """An error that no policy caused."""

    task: int
    problem: str


class Overran(msgspec.Struct, frozen=True, array_like=True, tag="overran"):
    """A cancelled call of the policy is still running after its timeout."""

    task: int
    policy: str
    place: int


FromExecutor = Verdicts | WaitingForSlot | Finished | Defect | Overran

to_executor = msgspec.msgpack.Decoder(ToExecutor)
from_executor = msgspec.msgpack.Decoder(FromExecutor)

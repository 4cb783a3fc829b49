"""What a round leaves for the judge: plain data, that can be kept and judged again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal
from zlib import crc32

import msgspec

_LOG = re.compile(r"\{(\d+)\}:log:(.+)")

Fate = Literal["plain", "fails before text", "cut in text", "cancelled", "deadline", "hostile"]
"""What the plan does to a run, beside all that chance does."""


class Piece(msgspec.Struct, frozen=True):
    """One block that a run must give."""

    turn: int
    kind: str
    whole: str
    """The content, or a call's arguments. `{tool_result}` in it: the results of the turn before, joined by a blank."""


class Guarded(msgspec.Struct, frozen=True, kw_only=True):
    """What policies must make of a run."""

    chain: tuple[str, ...]
    """Their names, in order."""
    blocked: tuple[Piece, ...]
    """Calls of the model that are never published and never run."""
    changed: tuple[Piece, ...]
    """Published replacements of other text."""
    reason: str
    """What the model reads in place of the result of a call that was blocked."""
    unheard: tuple[str, ...]
    """Text that no subscriber receives, wherever it is cut."""
    stopped: bool
    """A policy ends the run before its end."""
    may_fail: tuple[str, ...] = ()
    """Policies whose errors are expected and change no published text."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One run as it was asked for, and what it must come to if nothing disturbs it."""

    run: str
    provider: str
    mode: Literal["chat", "prefill"]
    stream: bool
    on_failure: str
    fate: Fate
    pieces: tuple[Piece, ...]
    """The published text."""
    guarded: Guarded | None = None


class Entry(msgspec.Struct, frozen=True):
    """One entry of a log or topic."""

    id: str
    event: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """One execution of a tool that came to its end."""

    run: str
    key: str
    """``run/turn/block`` of the call."""
    what: str
    nonce: str
    """In the result, so that each result names the execution that it came from."""


class KeyFact(msgspec.Struct, frozen=True):
    """One key as the server has it at rest."""

    name: str
    """Without the deployment's prefix."""
    type: str
    ttl_ms: int
    """-1: none."""
    length: int
    """Entries, fields or members."""
    pending: dict[str, int] = {}
    """A stream's groups, with what each has taken and not finished."""
    fields: dict[str, str] = {}
    """Of a lease."""


class Exit(msgspec.Struct, frozen=True):
    """How a worker ended."""

    kind: str
    pid: int
    asked: int | None
    """The signal by which it was to end; None: it ended by itself."""
    status: int
    ready: bool
    """It had said that it is ready."""
    log: str
    hurt_s: float | None = None
    """One of its tasks was ended or frozen, so long before it was asked to stop: it has to go by itself."""


class Visit(msgspec.Struct, frozen=True):
    """What one client of a gateway came to."""

    kind: str
    """Its protocol."""
    outcome: Literal["whole", "resumed", "an error", "silent end", "hangs"]
    run: str = ""
    seqs: list[int] = []
    """Numbers of the events that it heard, if its protocol tells them."""
    what: str = ""


class Change(msgspec.Struct, frozen=True):
    """A change of the number of partitions."""

    number: int
    """That was asked for."""
    placing: int
    """By which runs are placed in the end."""
    fresh: list[str]
    """Runs that were asked for when no worker could place by the old number any more."""


class Violation(msgspec.Struct, frozen=True, order=True):
    """A guarantee that did not hold."""

    rule: str
    run: str
    """Empty where no one run is concerned."""
    what: str


class Record(msgspec.Struct, kw_only=True):
    """A whole round, at rest: every run ended, or was given up waiting for."""

    seed: str
    prefix: str
    partitions: int
    lossy: bool = False
    """The server may have lost the last writes: an asynchronous fail-over."""
    stories: list[Story]
    logs: dict[str, list[Entry]]
    """By run."""
    topics: dict[str, list[list[Entry]]]
    """By name, `decisions` among them: the entries of each partition."""
    executions: list[Line]
    keys: list[KeyFact]
    """At rest, the workers still there."""
    living: list[int]
    """Pids of the workers at that time."""
    keys_after: list[KeyFact] = []
    """When all workers had stopped."""
    exits: list[Exit] = []
    complaints: list[str] = []
    """What workers logged as an error, and what they left behind at their end."""
    provider_connections: int = 0
    """Still open when all workers had stopped."""
    server_connections: int = 0
    late: dict[str, float] = {}
    """Runs still open this many seconds after the last fault, beyond their undisturbed duration."""
    faults: dict[str, int] = {}
    change: Change | None = None
    visits: list[Visit] = []
    """Of clients of gateways."""

    @property
    def placed(self) -> dict[str, list[int]]:
        """The partitions that hold a log of each run."""
        return places_of(self.keys)

    def homes(self) -> Callable[[str], int]:
        """Tells the partition of each run."""
        placed = self.placed
        return lambda run: placed[run][0] if run in placed else crc32(run.encode()) % self.partitions


def places_of(keys: Sequence[KeyFact]) -> dict[str, list[int]]:
    """By run: the partitions that hold a log of it."""
    placed: defaultdict[str, list[int]] = defaultdict(list)
    for key in keys:
        if found := _LOG.fullmatch(key.name):
            placed[found[2]].append(int(found[1]))
    return dict(placed)

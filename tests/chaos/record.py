"""What a round leaves for the judge: plain data that can be stored and judged again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal
from zlib import crc32

import msgspec

_LOG = re.compile(r"\{(\d+)\}:log:(?!tree/)(.+)")

Fate = Literal["plain", "fails before text", "cut in text", "cancelled", "deadline", "hostile", "huge"]
"""The planned fault of a run, besides all random ones."""


class Piece(msgspec.Struct, frozen=True):
    """One block that a run must produce."""

    turn: int
    kind: str
    whole: str
    """The content, or the arguments of a call. `{tool_result}` in it stands for the results of the previous turn,
    joined by a blank.
    """


class Guarded(msgspec.Struct, frozen=True, kw_only=True):
    """The expected effect of policies on a run."""

    chain: tuple[str, ...]
    """Their names, in order."""
    blocked: tuple[Piece, ...]
    """Calls of the model that are never published and never run."""
    changed: tuple[Piece, ...]
    """Published replacements of other text."""
    reason: str
    """What the model reads in place of the result of a blocked call."""
    withheld_text: tuple[str, ...]
    """Text that no subscriber receives, in one chunk or across several."""
    stopped: bool
    """A policy ends the run early."""
    may_fail: tuple[str, ...] = ()
    """Policies whose errors are expected and change no published text."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One run as requested, and its expected output if nothing disturbs it."""

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
    """One execution of a tool that finished."""

    run: str
    key: str
    """``run/turn/block`` of the call."""
    what: str
    nonce: str
    """Part of the result, so that each result names its execution."""


class KeyFact(msgspec.Struct, frozen=True):
    """One key of the server at rest."""

    name: str
    """Without the deployment's prefix."""
    type: str
    ttl_ms: int
    """-1: no TTL."""
    length: int
    """Entries, fields or members; of dead letters without copies."""
    pending: dict[str, int] = {}
    """The groups of a stream, each with its number of pending entries."""
    fields: dict[str, str] = {}
    """The fields of a lease."""


class Exit(msgspec.Struct, frozen=True):
    """How a worker ended."""

    kind: str
    pid: int
    requested: int | None
    """The signal that was sent to end it; None: it ended by itself."""
    status: int
    ready: bool
    """It had reported that it is ready."""
    log: str
    task_fault_s: float | None = None
    """Seconds between the fault of one of its tasks and the request to stop: it has to exit by itself."""


class Visit(msgspec.Struct, frozen=True):
    """The outcome of one client of a gateway."""

    kind: str
    """Its protocol."""
    outcome: Literal["whole", "resumed", "an error", "silent end", "hangs"]
    run: str = ""
    seqs: list[int] = []
    """Numbers of the events that it received, if its protocol has numbers."""
    what: str = ""


class Change(msgspec.Struct, frozen=True):
    """A change of the number of partitions."""

    number: int
    """The requested number."""
    placing: int
    """The number by which runs are placed in the end."""
    fresh: list[str]
    """Runs that were requested when no worker could place by the old number."""


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """A session at rest."""

    session: str
    log: list[dict[str, Any]]
    """The session's own events."""
    sent: list[list[str]]
    """The appends of each writer, in order."""
    got: list[list[str]]
    """What each live reader got: the `session_seq` of the session's events, and ``run:seq`` of those of runs."""
    fates: dict[str, str]
    """The state of each append, as the server would answer."""
    history: list[tuple[str, str]]
    """Role and text of each message, as the next run would get them."""
    withheld_text: tuple[str, ...] = ()
    """What the policies that judge what goes in do not let pass; empty: there are none."""


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A run with all below it, at rest."""

    root: str
    order: list[tuple[str, str]]
    """Run and value of each entry of the tree's order."""
    got: list[list[str] | None]
    """What each reader got, as ``run:seq``; None if it did not reach the end."""


class Violation(msgspec.Struct, frozen=True, order=True):
    """A guarantee that did not hold."""

    rule: str
    run: str
    """Empty if the violation concerns no single run."""
    what: str


class Record(msgspec.Struct, kw_only=True):
    """A whole round at rest: every run ended, or the wait for it timed out."""

    seed: str
    prefix: str
    partitions: int
    lossy: bool = False
    """The server may have lost the last writes in an asynchronous fail-over."""
    stories: list[Story]
    logs: dict[str, list[Entry]]
    """By run."""
    topics: dict[str, list[list[Entry]]]
    """By name, `decisions` among them: the entries of each partition."""
    executions: list[Line]
    holders: list[Line]
    """Executions that kept their interpreter's lock."""
    keys: list[KeyFact]
    """At rest, before the workers stopped."""
    living: list[int]
    """Pids of the workers at that time."""
    keys_after: list[KeyFact] = []
    """After all workers had stopped."""
    exits: list[Exit] = []
    complaints: list[str] = []
    """Errors in the logs of workers, and what workers left behind at their end."""
    provider_connections: int = 0
    """Still open after all workers had stopped."""
    server_connections: int = 0
    late: dict[str, float] = {}
    """Runs still open this many seconds after the last fault, beyond their undisturbed duration."""
    delays: dict[str, float] = {}
    """By run that ended before the last fault did: seconds from request to end, beyond its undisturbed duration and
    without those in which the harness waited for a processor.
    """
    without_room: list[str] = []
    """Each time that the server stayed full although something could be forgotten."""
    provider_stood_s: float = 0.0
    """The longest pass of the event loop in which the providers run, and the proxies before them."""
    huge_requests: int = 0
    """How often a huge request was sent, successfully or not."""
    faults: dict[str, int] = {}
    change: Change | None = None
    visits: list[Visit] = []
    """The visits of the clients of gateways."""
    talks: list[Talk] = []
    trees: list[Tree] = []

    @property
    def placed(self) -> dict[str, list[int]]:
        """The partitions that hold a log of each run."""
        return places_of(self.keys)

    def homes(self) -> Callable[[str], int]:
        """A function that returns the partition of each run."""
        placed = self.placed
        return lambda run: placed[run][0] if run in placed else place(run, self.partitions)


def place(run: str, number: int) -> int:
    """Where a run begins. A session and its runs are in one place: the beginning of the id is the session's. So are a
    run and those below it.
    """
    return crc32((run[:26] if run.startswith("s.") else run.partition("~")[0]).encode()) % number


def places_of(keys: Sequence[KeyFact]) -> dict[str, list[int]]:
    """By run: the partitions that hold a log of it."""
    placed: defaultdict[str, list[int]] = defaultdict(list)
    for key in keys:
        if found := _LOG.fullmatch(key.name):
            placed[found[2]].append(int(found[1]))
    return dict(placed)

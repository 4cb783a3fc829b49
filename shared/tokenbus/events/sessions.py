"""Sessions: the events of a session's own log, and the names that a session gives its runs.

A session belongs to a tenant and is stored under a digest of both names, so no text of theirs is part of a key. All its
keys and runs are in one partition: a run's id begins with the digest, and that part of it alone decides the partition.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Literal

import msgspec

from tokenbus.events.child_runs import root_of
from tokenbus.events.requests import SessionItem

DIGEST_CHARS = 24
_NAME = re.compile(rf"s\.[0-9a-f]{{{DIGEST_CHARS}}}(?:\.|$)")
_RUN = re.compile(rf"(s\.[0-9a-f]{{{DIGEST_CHARS}}})\.([0-9a-f]{{8}})\.([0-9]{{1,9}})")


def session_ref(tenant: str, name: str) -> str:
    """The session's name in keys: ``s.`` and a digest of tenant and name."""
    digest = sha256(b"\0".join((tenant.encode(), name.encode()))).hexdigest()
    return f"s.{digest[:DIGEST_CHARS]}"


def placing(name: str) -> str:
    """The part of a run's id that decides its partition: for a child run that of its tree's root, of which for a
    session's run that of the session.
    """
    name = root_of(name)
    return name[: DIGEST_CHARS + 2] if name.startswith("s.") and _NAME.match(name) else name


def is_reserved(run: str) -> bool:
    """Whether only a session may give this id to a run."""
    return _NAME.match(run) is not None


class SessionRun(msgspec.Struct, frozen=True):
    """What the id of a session's run says."""

    ref: str
    """See `session_ref`."""
    made: str
    """Which session of that name: it may be deleted and made again."""
    number: int
    """Counts the session's runs from 0."""

    @property
    def id(self) -> str:
        """The run's id."""
        return f"{self.ref}.{self.made}.{self.number}"

    @property
    def following(self) -> SessionRun:
        """The session's next run."""
        return SessionRun(self.ref, self.made, self.number + 1)


def session_run(run: str) -> SessionRun | None:
    """What the id says, if it is that of a session's run."""
    found = _RUN.fullmatch(run)
    return SessionRun(found[1], found[2], int(found[3])) if found else None


ReturnReason = Literal[
    "busy",
    "withdrawn",
    "queue_full",
    "heard_too_far",
    "not_waiting",
    "nothing_open",
    "newer_run",
    "exists",
    "refused",
    "rejected",
]
"""``busy``: a run is open, and `when_busy` is `reject` or the append rewrites. ``heard_too_far``: the run has no event
as new. ``not_waiting``: there is nothing to withdraw. ``nothing_open``: there is nothing to interrupt. ``newer_run``:
the run to interrupt is not the newest. ``exists``: ``messages`` for a session that is there. ``refused``: the append is
invalid, see ``problem``. ``rejected``: the policies that judge what goes in did not let it pass, see ``problem``.
"""


class SessionEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Fields of every event of a session.

    If ``run`` is set, the event's place is behind the event ``run_seq`` of this run, -1 for before its first. On the
    topic `sessions` each also says which session it is of: ``session``, its name within the ``tenant``, and ``made``,
    which session of that name.
    """

    session_seq: int
    """Counts the session's events from 0 without a gap."""
    at_ms: int
    run: str | None = None
    run_seq: int | None = None
    session: str | None = None
    tenant: str | None = None
    made: str | None = None

    @property
    def seq(self) -> int:
        """``session_seq``, under the name that events of runs use."""
        return self.session_seq


class Configured(SessionEvent, frozen=True, kw_only=True, tag="configured"):
    """The configuration changed, for messages that are appended from now on. The first event of a session."""

    append: str
    item: SessionItem
    item_bytes: int | None = None
    """On the topic: the item was longer than 64 KiB, so that it has its type alone here. The session's log has it."""


class Appended(SessionEvent, frozen=True, kw_only=True, tag="appended"):
    """The append was accepted. Its fate follows as `Delivered` or `Returned`."""

    append: str
    item: SessionItem
    item_bytes: int | None = None
    """As in `Configured`."""


class Delivered(SessionEvent, frozen=True, kw_only=True, tag="delivered"):
    """The append took effect: in the run ``run``, if it concerns one."""

    append: str
    turn: int = 0


class Returned(SessionEvent, frozen=True, kw_only=True, tag="returned"):
    """The append had no effect and never will have one."""

    append: str
    reason: ReturnReason
    problem: str | None = None


class RunEnded(SessionEvent, frozen=True, kw_only=True, tag="run_ended"):
    """The run ended; its terminal event is the one before. ``status`` `lost`: nothing of the run is left."""

    status: Literal["completed", "incomplete", "failed", "cancelled", "lost"]


class Deleted(SessionEvent, frozen=True, kw_only=True, tag="deleted"):
    """The session is gone, by this append. On the topic alone: its log is gone too."""

    append: str


class UnknownSessionEvent(SessionEvent, frozen=True, kw_only=True, tag="unknown"):
    """An event with a type or value that this version of tokenbus does not know, written by a newer version.

    Its place in the session's order is known. It is never written: it stands for the event that was read.
    """

    event_type: str
    """The event's actual ``type``."""
    fields: dict[str, object]
    """All its fields, as written."""


AnySessionEvent = Configured | Appended | Delivered | Returned | RunEnded | UnknownSessionEvent
"""Event types of a session's log."""
SessionTopicEvent = AnySessionEvent | Deleted
"""Event types of the topic `sessions`."""


class Fate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of an append."""

    state: Literal["appended", "delivered", "returned"]
    """``appended``: it waits."""
    run: str | None = None
    """The run that it started, or that it ended."""
    turn: int | None = None
    reason: ReturnReason | None = None
    problem: str | None = None


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session as `Client.sessions` lists it. Times are Unix times in ms of the server's clock."""

    session: str
    """Its name within the tenant."""
    tenant: str | None = None
    begun_ms: int
    last_ms: int
    """Of its last append, or of the end of its last run."""
    provider: str
    model: str
    """Of its configuration."""
    metadata: dict[str, object] = {}
    """Of its configuration."""
    begins: str = ""
    """The beginning of its first message, at most 200 characters."""
    runs: int = 0
    """How many it has had, the open one included."""
    run: str | None = None
    """The open one."""
    waiting: int = 0
    """How many messages wait."""

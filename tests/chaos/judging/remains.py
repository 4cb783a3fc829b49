"""What is left when all runs have ended, and when all workers have.

No key without a bound, nothing pending, no lease of the dead, no worker that ended in any other way than it was to.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from tests.chaos.record import Exit, KeyFact, Record, Violation

SERVER_AWAY = 3
"""Exit code of a worker that found no server at its start; a supervisor starts it again."""
STUCK = 7
"""That of a worker that could not continue."""
GOES_S = 25.0
"""So long after one of its tasks was hurt it is gone: that is noticed, and what it holds handed back."""
_TTL = re.compile(
    r"\{\d+\}:(run|log|index:open|index:ended):.+|\{\d+\}:index:ended|members:.+|mcp:.+|\{activity\}:\d+"
    r"|\{gateway\}:(members|published:.+)"
)
_EMPTY = re.compile(r"requests|\{\d+\}:(turns|tools|state:.+|index:open)")
_TRIMMED = re.compile(r"\{\d+\}:(raw|events|drafts)")
_KEPT = re.compile(r"\{\d+\}:(visible|chunks|blocks|runs|decisions)")
_LEASE = re.compile(r"\{\d+\}:lease:(normalizer|parser|policy)")
_MOST_TRIMMED = 300
"""A trimmed stream's most entries at rest: a trim goes by whole nodes, of 100 entries by default."""
_MOST_CONTROL = 1_200
_LOSS_TOLD = ("a fail-over lost the entries after", "runs that lost events continue")
"""What an owner logs that remembers more than the server does, and one that lost its lease over it."""
_PID = re.compile(r".*-(\d+)-[0-9a-f]{8}")
"""Host, process and chance: the name of a worker."""


def judge(record: Record) -> Iterator[Violation]:
    """The rules of what may be left."""
    for key in record.keys:
        if problem := _key(key):
            yield Violation("keys", "", f"{key.name}: {problem}")
        for group, count in key.pending.items():
            if count:
                yield Violation("pending", "", f"{key.name}: {count} entries of the group {group}")
        if _LEASE.fullmatch(key.name):
            yield from _lease(key, [*record.living, *_going(record)])
    for key in record.keys_after:
        if "owner" in key.fields:
            yield Violation("leases", "", f"{key.name} is held by {key.fields['owner']}, and no worker is left")
    for end in record.exits:
        if problem := _exit(end):
            yield Violation("workers", "", f"{end.log}: {problem}")
    for complaint in record.complaints:
        if record.lossy and any(told in complaint for told in _LOSS_TOLD):
            continue
        yield Violation("workers", "", complaint)
    for run, seconds in record.late.items():
        yield Violation("late", run, f"still open {seconds:g} s after the last fault")
    if record.provider_connections:
        yield Violation("sockets", "", f"{record.provider_connections} connections to the provider are open")
    if record.server_connections:
        yield Violation("sockets", "", f"{record.server_connections} connections to the server are open")


def _key(key: KeyFact) -> str | None:
    """What is wrong with a key at rest. Every key is known, and something bounds it."""
    name = key.name
    if _TTL.fullmatch(name):
        return None if key.ttl_ms >= 0 else "has no TTL"
    if _EMPTY.fullmatch(name):
        return f"holds {key.length}, and nothing is to be done" if key.length else None
    if _TRIMMED.fullmatch(name):
        return f"{key.length} entries, though all are consumed" if key.length > _MOST_TRIMMED else None
    if name.endswith(":control"):
        return f"{key.length} entries" if key.length > _MOST_CONTROL else None
    if name == "dead":
        return f"{key.length} entries are dead, and none was poison"
    if name == "meta" or _KEPT.fullmatch(name) or _LEASE.fullmatch(name):
        return None
    return "nobody knows what bounds it"


def _going(record: Record) -> list[int]:
    """Workers of which a task was hurt so late that they may still have been there, and hold what they held."""
    return [end.pid for end in record.exits if end.hurt_s is not None and end.hurt_s <= GOES_S]


def _lease(key: KeyFact, living: list[int]) -> Iterator[Violation]:
    owner = key.fields.get("owner", "nobody")
    pid = _PID.fullmatch(owner)
    if not pid or int(pid[1]) not in living:
        yield Violation("leases", "", f"{key.name} is held by {owner}; alive are {living}")
    arrived, done = key.fields.get("arrived", "0"), key.fields.get("done", "0")
    if arrived != done:
        yield Violation("leases", "", f"{key.name}: {arrived} bytes arrived and {done} are done, at rest")


def _exit(end: Exit) -> str | None:
    if end.hurt_s is not None:
        if end.asked is None:
            return None if end.status == STUCK else f"one of its tasks was hurt, and it ended with {end.status}"
        return (
            f"one of its tasks was hurt {end.hurt_s:.0f} s before, and it was still there"
            if end.hurt_s > GOES_S
            else None
        )
    match end.asked:
        case signal.SIGKILL:
            return None
        case signal.SIGTERM:
            allowed = (0,) if end.ready else (0, SERVER_AWAY, -signal.SIGTERM)
            return None if end.status in allowed else f"asked to stop, it ended with {end.status}"
        case _:
            # A worker that could not continue has to go; that its runs continued elsewhere, the other rules say.
            if end.status == STUCK or (end.status == SERVER_AWAY and not end.ready):
                return None
            return f"it ended by itself, with {end.status}" + ("" if end.ready else ", before it was ready")

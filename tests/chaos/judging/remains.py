"""What is left when all runs have ended, and when all workers have ended.

Every key is bounded, nothing is pending, no dead worker has a lease, and each worker ended as expected.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from tests.chaos.record import Exit, KeyFact, Record, Violation

SERVER_AWAY = 3
"""Exit code of a worker that found no server at its start; a supervisor restarts it."""
STUCK = 7
"""Exit code of a worker that could not continue."""
EXIT_S = 25.0
"""A worker is gone this long after one of its tasks was ended or frozen: it notices the fault, and hands back what it
owns.
"""
_TTL = re.compile(
    r"\{\d+\}:(run|log|session|index:open|index:ended|index:sessions):.+|\{\d+\}:index:(ended|sessions|away)|members:.+|mcp:.+|\{activity\}:\d+"
    r"|\{\d+\}:owed:.+|\{gateway\}:(members|published:.+)|\{.+:dead\}:added:.+"
)
_EMPTY = re.compile(r"requests|\{\d+\}:(turns|tools|state:.+|index:open)")
_TRIMMED = re.compile(r"\{\d+\}:(raw|events|drafts)")
_KEPT = re.compile(r"\{\d+\}:(visible|chunks|blocks|runs|decisions|sessions)")
_REJECTED = re.compile(r"\{.+:dead\}:rejected")
_LEASE = re.compile(r"\{\d+\}:lease:(normalizer|parser|policy)")
_MOST_TRIMMED = 300
"""Maximum entries of a trimmed stream at rest: a trim removes whole nodes, of 100 entries by default."""
_MOST_CONTROL = 1_200
_MOST_AUDITED = 10_100
_LOSS_MESSAGES = ("a fail-over lost the entries after", "runs that lost events continue")
"""Log messages of an owner that remembers more than the server does, and of one that lost its lease because of this."""
_HUGE_MESSAGES = ("-huge", "bytes: at most 100663296 are read", "UnreadableEntry")
"""What messages about a request contain that is larger than a worker reads: its run, or its size."""
_PID = re.compile(r".*-(\d+)-[0-9a-f]{8}")
"""The name of a worker: host, process and a random part."""


def judge(record: Record) -> Iterator[Violation]:
    """Check what is left."""
    for key in record.keys:
        if problem := _key(key, record.huge_requests):
            yield Violation("keys", "", f"{key.name}: {problem}")
        for group, count in key.pending.items():
            if count:
                yield Violation("pending", "", f"{key.name}: {count} entries of the group {group}")
        if _LEASE.fullmatch(key.name):
            yield from _lease(key, [*record.living, *_exiting(record)])
    for key in record.keys_after:
        if "owner" in key.fields:
            yield Violation("leases", "", f"{key.name} is held by {key.fields['owner']}, and no worker is left")
    for end in record.exits:
        if problem := _exit(end):
            yield Violation("workers", "", f"{end.log}: {problem}")
    for complaint in record.complaints:
        if record.lossy and any(message in complaint for message in _LOSS_MESSAGES):
            continue
        if record.huge_requests and any(message in complaint for message in _HUGE_MESSAGES):
            continue
        yield Violation("workers", "", complaint)
    for run, seconds in record.late.items():
        yield Violation("late", run, f"still open {seconds:g} s after the last fault")
    if record.provider_connections:
        yield Violation("sockets", "", f"{record.provider_connections} connections to the provider are open")
    if record.server_connections:
        yield Violation("sockets", "", f"{record.server_connections} connections to the server are open")


def _key(key: KeyFact, poison: int) -> str | None:
    """What is wrong with a key at rest. Every key must be known and bounded. ``poison``: entries that may be dead."""
    name = key.name
    if _TTL.fullmatch(name):
        return None if key.ttl_ms >= 0 else "has no TTL"
    if _EMPTY.fullmatch(name):
        return f"holds {key.length}, and no work is left" if key.length else None
    if _TRIMMED.fullmatch(name):
        return f"{key.length} entries, though all are consumed" if key.length > _MOST_TRIMMED else None
    if name in ("audit", "audit:clients"):
        return f"{key.length} entries" if key.length > _MOST_AUDITED else None
    if name.endswith(":control"):
        return f"{key.length} entries" if key.length > _MOST_CONTROL else None
    if _REJECTED.fullmatch(name):  # the ids of those dead letters and of their copies
        return f"{key.length} requests were refused, and none should be" if key.length and not poison else None
    if name == "dead":
        return f"{key.length} entries are dead, and {poison} were poison" if key.length > poison else None
    if name == "meta" or _KEPT.fullmatch(name) or _LEASE.fullmatch(name):
        return None
    return "the judge knows no bound for it"


def _exiting(record: Record) -> list[int]:
    """Workers with a task fault shortly before the end: they may still have run and owned partitions."""
    return [end.pid for end in record.exits if end.task_fault_s is not None and end.task_fault_s <= EXIT_S]


def _lease(key: KeyFact, living: list[int]) -> Iterator[Violation]:
    owner = key.fields.get("owner", "no worker")
    pid = _PID.fullmatch(owner)
    if not pid or int(pid[1]) not in living:
        yield Violation("leases", "", f"{key.name} is owned by {owner}; alive are {living}")
    arrived, done = key.fields.get("arrived", "0"), key.fields.get("done", "0")
    if arrived != done:
        yield Violation("leases", "", f"{key.name}: {arrived} bytes arrived and {done} are done, at rest")


def _exit(end: Exit) -> str | None:
    if end.task_fault_s is not None:
        if end.requested is None:
            return None if end.status == STUCK else f"one of its tasks was ended or frozen, exit code {end.status}"
        return (
            f"one of its tasks was ended or frozen {end.task_fault_s:.0f} s before, and it was still running"
            if end.task_fault_s > EXIT_S
            else None
        )
    match end.requested:
        case signal.SIGKILL:
            return None
        case signal.SIGTERM:
            allowed = (0,) if end.ready else (0, SERVER_AWAY, -signal.SIGTERM)
            return None if end.status in allowed else f"asked to stop, it ended with {end.status}"
        case _:
            # A worker that could not continue has to exit; other rules check that its runs continued elsewhere.
            if end.status == STUCK or (end.status == SERVER_AWAY and not end.ready):
                return None
            return f"it ended by itself, with {end.status}" + ("" if end.ready else ", before it was ready")

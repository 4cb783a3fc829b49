"""Dead letters: the dead stream keeps each poison entry's bytes, the reason and the origin."""

from __future__ import annotations

import builtins
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus.keys import DATA_FIELD, Keys, partition_in
from tokenbus.bus.scripts import dead_letters as scripts
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.webhooks import Deliveries, Delivery
from tokenbus.errors import CannotRetry, DeadNotFound

log = logging.getLogger(__name__)

KEPT_BYTES = 256 * 1024
"""Maximum bytes kept per entry, so that `retention.dead_entries` of them do not fill a server."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One JSON object of the dead stream; ``bytes`` is base64."""

    reason: str
    stage: str
    """What failed to process it: a stage, ``intake``, ``fetcher``, ``tools``, ``webhooks``, or a group of subscribers.
    """
    stream: str
    entry: str
    """The entry's id in ``stream``."""
    bytes: builtins.bytes
    """The run's data in the entry. For a request without ``__data__``: all fields, as a msgpack map."""
    run: str | None = None
    size: int | None = None
    """Original size in bytes, if not all of them are kept."""
    seq: int | None = None
    """The event's seq in its run, if a group's handler failed."""
    group: str | None = None
    """The group, as its lease names it: ``visible:tts``."""


DEAD_ENTRIES = 10_000
"""Entries kept by a writer that does not know the deployment's settings, unless there are more."""
RETURNED_MS = 7 * 86_400_000
"""How long an event that was given back is kept, after the last of its partition."""
ADDED_MS = 600_000
"""A try that lost its reply longer ago adds its entry a second time."""
REJECTED_SHARE = 4
"""Rejected requests get one part in this many of the dead stream; the rest is reserved for poison."""


async def dead_letter(
    server: Server,
    keys: Keys,
    entry: DeadLetter,
    *,
    most: int | None = None,
    rejected: bool = False,
    stop_if: Callable[[], bool] | None = None,
) -> None:
    """Add an entry to the dead stream, which keeps the last ``most``; None: `DEAD_ENTRIES`, or as many as it has.
    Retries until the server accepts it; a reply that was lost adds no second one.

    ``rejected``: the entry is a request that was rejected for its content. Such entries displace only each other.

    If the server never accepts the entry, it is only logged; poison must not block its caller. Raises redis-py's errors
    once ``stop_if`` returns True.
    """
    if (size := len(entry.bytes)) > KEPT_BYTES:
        entry = msgspec.structs.replace(entry, bytes=entry.bytes[:KEPT_BYTES], size=size)
    data = msgspec.json.encode(entry)

    added = keys.added(uuid4().hex)

    async def add() -> None:
        kept = most or max(DEAD_ENTRIES, await server.client.xlen(keys.dead))
        if rejected:
            share = max(1, kept // REJECTED_SHARE)
            lists = (keys.dead, keys.rejected, added)
            call = scripts.add_rejected(*lists, most=kept, most_rejected=share, keep_ms=ADDED_MS, data=data)
        else:
            call = scripts.add(keys.dead, added, most=kept, keep_ms=ADDED_MS, data=data)
        await run_script(server, call)

    try:
        await retry_until_available(
            server,
            add,
            what=f"dead entry of {entry.stage}",
            stop_if=stop_if,
        )
    except (RedisError, OSError):
        if stop_if and stop_if():
            raise
        log.exception("dead entry is lost: %s of %s, run %s: %s", entry.entry, entry.stream, entry.run, entry.reason)
        return
    if server.on_dead_letter:
        server.on_dead_letter("rejected" if rejected else "crashed")


class StoredDeadLetter(msgspec.Struct, frozen=True):
    """An entry of the dead stream with its stream id, which contains the time."""

    id: str
    entry: DeadLetter


PAGE = 32
"""Entries per read; each may have `KEPT_BYTES`."""


async def newest_dead_letters(
    server: Server, keys: Keys, *, most: int, after: str | None = None
) -> AsyncIterator[StoredDeadLetter]:
    """Up to ``most`` entries, newest first; only older ones than the entry ``after``. Raises redis-py's errors."""
    end = "+" if after is None else f"({after}"
    while most > 0:
        page: Any = await server.client.xrevrange(keys.dead, max=end, count=min(most, PAGE))
        for entry_id, fields in page:
            yield _stored(keys, entry_id, fields)
        if not page:
            return
        most -= len(page)
        end = f"({page[-1][0].decode()}"


async def all_dead_letters(server: Server, keys: Keys) -> AsyncIterator[StoredDeadLetter]:
    """All entries that exist at the start, oldest first; entries may be dropped meanwhile.

    Raises redis-py's errors.
    """
    newest: Any = await server.client.xrevrange(keys.dead, count=1)
    if not newest:
        return
    begin, end = "-", newest[0][0].decode()
    while page := await server.client.xrange(keys.dead, min=begin, max=end, count=PAGE):
        for entry_id, fields in page:
            yield _stored(keys, entry_id, fields)
        begin = f"({page[-1][0].decode()}"


async def find_dead_letter(server: Server, keys: Keys, entry_id: str) -> StoredDeadLetter:
    """One entry. Raises DeadNotFound and redis-py's errors."""
    found: Any = await server.client.xrange(keys.dead, min=entry_id, max=entry_id)
    if not found:
        raise DeadNotFound(entry_id)
    return _stored(keys, *found[0])


async def drop_dead_letter(server: Server, keys: Keys, entry_ids: Sequence[str]) -> int:
    """Delete entries; return how many existed. Raises redis-py's errors."""
    pipe = server.client.pipeline(transaction=False)
    pipe.xdel(keys.dead, *entry_ids)
    for entry_id in entry_ids:  # a rejected request is counted by this list
        pipe.lrem(keys.rejected, 1, entry_id)
    dropped, *_ = await pipe.execute()
    return dropped


async def give_back(server: Server, keys: Keys, dead: StoredDeadLetter) -> str:
    """Give an event back to the group that it failed in, or a delivery to its webhook, and return the group's or the
    webhook's name; it is tried within seconds. Raises CannotRetry for another entry, and redis-py's errors.
    """
    e = dead.entry
    if e.size:
        raise CannotRetry(dead.id, f"only {len(e.bytes)} of its {e.size} bytes are kept")
    if receiver := keys.webhook_of(e.stream):
        seconds, microseconds = await server.client.time()
        now_ms = seconds * 1000 + microseconds // 1000
        await Deliveries(server, keys, receiver).add(Delivery(e.entry, e.run or "", now_ms, e.bytes))
        return receiver
    partition = partition_in(e.stream)
    if e.group is None or partition is None:
        raise CannotRetry(dead.id, "neither a group of subscribers nor a webhook had it")
    stream = keys.returned(partition, e.group)
    pipe = server.client.pipeline(transaction=False)
    pipe.xadd(stream, {DATA_FIELD: e.bytes})
    pipe.pexpire(stream, RETURNED_MS)
    await pipe.execute()
    return e.group


def _stored(keys: Keys, entry_id: bytes, fields: dict[bytes, bytes]) -> StoredDeadLetter:
    data = fields.get(DATA_FIELD.encode(), b"")
    try:
        entry = msgspec.json.decode(data, type=DeadLetter)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        # Not written by tokenbus; show it so that it can be dropped.
        reason = f"no entry of tokenbus: {e}"
        entry = DeadLetter(reason=reason, stage="", stream=keys.dead, entry=entry_id.decode(), bytes=data)
    return StoredDeadLetter(entry_id.decode(), entry)

"""Debug records on the server: the data that a run keeps for its recorder, and the index of the records.

The records themselves are blobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import FRAME, RECORD
from tokenbus.bus.scripts.records import index_record
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.errors import RecordNotFound

PAGE = 100
FORGET_PAGE = 500
"""Frames deleted per command: each may have 256 KB, and a run may have tens of thousands."""


class RecordEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Index entry of one recorded run: one JSON object."""

    run: str
    at_ms: int
    """Unix time at which the run was accepted."""
    status: str
    """Final status: ``completed``, ``incomplete``, ``failed`` or ``cancelled``."""
    provider: str
    model: str
    attempts: int
    raw_bytes: int
    """Bytes of the raw stream that were kept."""
    blob_id: str
    """The record itself, in the form that `sanitize_for_storage` returns."""
    size: int
    """Size of that blob in bytes."""
    parts: tuple[str, ...] = ()
    """Blobs that the record refers to."""
    tenant: str = ""
    """The request's tenant."""
    truncated: bool = False
    """Whether the end of the raw stream is missing because it exceeded the limit."""


_decode = msgspec.json.Decoder(RecordEntry).decode


async def forget_recorded(server: Server, keys: Keys, run: str) -> None:
    """Delete what a run kept for its recorder. Raises redis-py's errors; idempotent.

    Deletes the field ``record`` first: a reader that still finds it after reading the rest has read everything.
    """
    client, key = server.client, keys.run(run)
    await client.hdel(key, RECORD)
    await client.unlink(keys.tape(run))
    frames = [name for name in await client.hkeys(key) if name.startswith(FRAME.encode())]
    for at in range(0, len(frames), FORGET_PAGE):
        await client.hdel(key, *frames[at : at + FORGET_PAGE])


async def put_record(server: Server, keys: Keys, entry: RecordEntry, *, keep_ms: int, most: int) -> None:
    """Add an entry to the index; idempotent. Raises redis-py's errors."""
    call = index_record(
        keys.records,
        keys.record_entries,
        keep_ms=keep_ms,
        most=most,
        run=entry.run,
        at_ms=entry.at_ms,
        entry=msgspec.json.encode(entry),
    )
    await run_script(server, call)


async def drop_record(server: Server, keys: Keys, run: str) -> int:
    """Remove the entry of a run; return how many there were. Raises redis-py's errors."""
    pipe = server.client.pipeline(transaction=False)
    pipe.zrem(keys.records, run)
    pipe.hdel(keys.record_entries, run)
    return (await pipe.execute())[1]


async def drop_old_records(server: Server, keys: Keys, *, keep_ms: int, most: int) -> int:
    """Remove index entries that are too old or too many; return how many. Raises redis-py's errors."""
    return await run_script(server, index_record(keys.records, keys.record_entries, keep_ms=keep_ms, most=most))


async def newest_records(server: Server, keys: Keys) -> AsyncIterator[RecordEntry]:
    """All entries, newest first. Raises redis-py's errors."""
    at = 0
    while runs := await server.client.zrange(keys.records, at, at + PAGE - 1, desc=True):
        for found in await server.client.hmget(keys.record_entries, runs):
            if found is not None:  # None: dropped meanwhile
                yield _decode(found)
        at += len(runs)


async def find_record(server: Server, keys: Keys, run: str) -> RecordEntry:
    """The entry of a run. Raises RecordNotFound and redis-py's errors."""
    found = await server.client.hget(keys.record_entries, run)
    if found is None:
        raise RecordNotFound(run)
    return _decode(found)

"""Debug records on the server: what a run keeps for its recorder, and the index of what was recorded.

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
"""Frames that are dropped in one step: each may have 256 KB, and a run tens of thousands of them."""


class RecordEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the index says of one recorded run: one JSON object."""

    run: str
    at_ms: int
    """Unix time at which the run was accepted."""
    status: str
    """How it ended: ``completed``, ``incomplete``, ``failed`` or ``cancelled``."""
    provider: str
    model: str
    attempts: int
    raw_bytes: int
    """Of the raw stream that was kept."""
    blob_id: str
    """The record itself, as `sanitize_for_storage` leaves it."""
    size: int
    """Bytes of that blob."""
    parts: tuple[str, ...] = ()
    """The blobs that it refers to."""
    truncated: bool = False
    """The raw stream was longer than what may be kept, so its end is missing."""


_decode = msgspec.json.Decoder(RecordEntry).decode


async def forget_recorded(server: Server, keys: Keys, run: str) -> None:
    """Drop what a run kept for its recorder. Raises what redis-py raises; may be called again.

    The field ``record`` goes first: whoever still finds it after reading the rest has read all of it.
    """
    client, key = server.client, keys.run(run)
    await client.hdel(key, RECORD)
    await client.unlink(keys.tape(run))
    frames = [name for name in await client.hkeys(key) if name.startswith(FRAME.encode())]
    for at in range(0, len(frames), FORGET_PAGE):
        await client.hdel(key, *frames[at : at + FORGET_PAGE])


async def put_record(server: Server, keys: Keys, entry: RecordEntry, *, keep_ms: int, most: int) -> None:
    """Put an entry into the index, once however often. Raises what redis-py raises."""
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


async def drop_old_records(server: Server, keys: Keys, *, keep_ms: int, most: int) -> int:
    """Drop from the index what is too old or too many; how many. Raises what redis-py raises."""
    return await run_script(server, index_record(keys.records, keys.record_entries, keep_ms=keep_ms, most=most))


async def newest_records(server: Server, keys: Keys) -> AsyncIterator[RecordEntry]:
    """All entries, the newest first. Raises what redis-py raises."""
    at = 0
    while runs := await server.client.zrange(keys.records, at, at + PAGE - 1, desc=True):
        for found in await server.client.hmget(keys.record_entries, runs):
            if found is not None:  # dropped meanwhile
                yield _decode(found)
        at += len(runs)


async def find_record(server: Server, keys: Keys, run: str) -> RecordEntry:
    """The entry of a run. Raises RecordNotFound, and what redis-py raises."""
    found = await server.client.hget(keys.record_entries, run)
    if found is None:
        raise RecordNotFound(run)
    return _decode(found)

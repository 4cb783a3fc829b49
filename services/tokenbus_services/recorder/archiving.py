"""Moves the log of a run that has ended to the archive, in pieces: a log is never in memory as a whole."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.run_index import read_runs
from tokenbus.bus.run_record import ARCHIVE, HISTORY, REQUEST
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.events.run_info import RunInfo

MOST_MEDIA = 500
"""More than a request may have."""
_BLOB_ID = re.compile(rb"sha256:[0-9a-f]{64}")
PAGE = 100
"""Entries read at once; one may have 256 KB."""


async def to_archive(server: Server, keys: Keys, run: str) -> RunInfo | None:
    """The summary of a run that is to be archived; None if it was, or has expired. Raises redis-py's errors."""
    if not await server.client.hexists(keys.run(run), ARCHIVE):
        return None
    [info] = await read_runs(server.client, keys, [run])
    return info if info and info.ended_ms else None


class _Head(RunInfo, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of an archived log."""

    blobs: tuple[str, ...] = ()
    """Media of the request and of tool results, which no event names: kept as long as the log, and erased with it."""


async def _media(server: Server, keys: Keys, run: str) -> tuple[str, ...]:
    client, key, found = server.client, keys.run(run), set[bytes]()
    for field in await client.hkeys(key):
        if field == REQUEST.encode() or field.startswith(HISTORY.encode()):
            found.update(_BLOB_ID.findall(await client.hget(key, field) or b""))
    return tuple(blob_id.decode() for blob_id in sorted(found)[:MOST_MEDIA])


async def archived(server: Server, keys: Keys, run: str) -> None:
    """Note that the run is in the archive. Raises redis-py's errors; idempotent."""
    await server.client.hdel(keys.run(run), ARCHIVE)


async def log_lines(server: Server, keys: Keys, info: RunInfo) -> AsyncGenerator[bytes]:
    """The lines of an archived log: the run's summary, then its events in order. Waits for a server that is away."""
    media = await retry_until_available(server, partial(_media, server, keys, info.run), what="media of a run")
    yield msgspec.json.encode(_Head(**msgspec.structs.asdict(info), blobs=media)) + b"\n"
    begin = "-"
    while page := await retry_until_available(
        server, partial(read_page, server, keys.log(info.run), begin), what="a log"
    ):
        yield b"".join(fields[DATA_FIELD.encode()] + b"\n" for _, fields in page)
        begin = f"({page[-1][0].decode()}"


async def read_page(server: Server, stream: str, begin: str) -> list[Any]:
    """Entries of a stream, from ``begin`` on. Raises redis-py's errors."""
    return await server.client.xrange(stream, begin, "+", count=PAGE)

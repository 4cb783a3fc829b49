"""Collects everything the server holds about a finished recorded run."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.run_record import ACCEPTED, FRAME, HISTORY, RECORD, REQUEST
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import ANY_FRAME, history_decoder
from tokenbus_services.recorder.record import Record, packed

PAGE = 100
"""Frames or entries to read at once; a frame may have 256 KB."""


async def gather(server: Server, keys: Keys, run: str) -> Record | None:
    """Build the record; None if the data is gone (already recorded, or expired). Raises redis-py's exceptions."""
    client, key = server.client, keys.run(run)
    names = sorted((name.decode() for name in await client.hkeys(key)), key=_place)
    found = await _fields(server, key, [n for n in names if n.startswith(FRAME)])
    tape = await _entries(server, keys.tape(run), b"taken")
    events = await _entries(server, keys.log(run), DATA_FIELD.encode())
    histories = await _fields(server, key, [n for n in names if n.startswith(HISTORY)])
    # Read last: while this field exists, nothing above was dropped.
    accepted, request, left = await client.hmget(key, [ACCEPTED, REQUEST, RECORD])
    if left is None or request is None:
        return None
    return Record(
        run=run,
        accepted_ms=int(accepted or 0),
        request=msgspec.json.decode(request),
        history={
            name.removeprefix(HISTORY): msgspec.to_builtins(history_decoder.decode(data))
            for name, data in histories.items()
        },
        frames=packed(list(found.values())),
        tape=packed(tape),
        events=[msgspec.json.decode(event) for event in events],
        truncated=int(left) < 0,
    )


def _place(name: str) -> tuple[float, ...]:
    """Sort key of a field. An end frame not written by the attempt's fetcher is the last of its attempt."""
    if name.startswith(HISTORY):
        return (int(name.removeprefix(HISTORY)),)
    if name.startswith(FRAME):
        attempt, n = map(int, name.removeprefix(FRAME).split(":"))
        return attempt, float("inf") if n == ANY_FRAME else n
    return ()


async def _fields(server: Server, key: str, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for at in range(0, len(names), PAGE):
        page = names[at : at + PAGE]
        values: list[bytes | None] = await server.client.hmget(key, page)
        found.update((name, value) for name, value in zip(page, values, strict=True) if value is not None)
    return found


async def _entries(server: Server, stream: str, field: bytes) -> list[bytes]:
    values: list[bytes] = []
    begin = "-"
    while page := await _page(server, stream, begin):
        values += [fields[field] for _, fields in page]
        begin = f"({page[-1][0].decode()}"
    return values


async def _page(server: Server, stream: str, begin: str) -> list[Any]:
    return await server.client.xrange(stream, begin, "+", count=PAGE)

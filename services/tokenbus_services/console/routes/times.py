"""When the events of a run were: the log of a run has their order, the topics their times."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus.bus.keys import DATA_FIELD
from tokenbus.bus.run_record import ACCEPTED
from tokenbus.bus.server.server import translated
from tokenbus_services.console.access.session import PATH, Viewer
from tokenbus_services.console.http import Desk, json

MAX_LOOKED_AT = 4000
"""Entries of each topic. A longer run has times for its beginning only."""
_PAGE = 500
_TOPICS = ("runs", "blocks")
_ENDS = frozenset({"completed", "incomplete", "failed", "cancelled"})


class _Event(msgspec.Struct):
    type: str
    run: str
    seq: int


_decoder = msgspec.json.Decoder(_Event)


def routes(desk: Desk) -> list[BaseRoute]:
    async def times(request: Request, viewer: Viewer) -> Response:
        return json({"times": await _times(desk, await desk.run(request, viewer))})

    return [Route(f"{PATH}/api/runs/{{run}}/times", desk.view("see_runs", times, links=True), methods=["GET"])]


async def _times(desk: Desk, run: str) -> list[tuple[int, int]]:
    """Seq and Unix time in ms of the run's events on the topics `runs` and `blocks`, as far as these reach back."""
    server, keys = desk.gateway.runs.server, desk.gateway.runs.keys
    partition = keys.partition_of(run)
    key = keys.run(run)
    with translated(server, key):
        accepted: bytes | None = await server.client.hget(key, ACCEPTED)
    if accepted is None:
        return []
    found: dict[int, int] = {}
    last = "+"
    for topic in _TOPICS:
        stream = keys.topic(partition, topic)
        start = str(int(accepted))
        for _ in range(MAX_LOOKED_AT // _PAGE):
            with translated(server, stream):
                page: list[Any] = await server.client.xrange(stream, min=start, max=last, count=_PAGE)
            ended = None
            for entry, fields in page:
                event = _event(fields.get(DATA_FIELD.encode(), b""), run)
                if event is None:
                    continue
                found[event.seq] = int(entry.partition(b"-")[0])
                if event.type in _ENDS:
                    ended = str(found[event.seq])
            if ended is not None:
                last = ended  # nothing of the run comes after it on the other topic
                break
            if len(page) < _PAGE:
                break
            start = f"({page[-1][0].decode()}"
    return sorted(found.items())


def _event(data: bytes, run: str) -> _Event | None:
    if run.encode() not in data:
        return None
    try:
        event = _decoder.decode(data)
    except msgspec.DecodeError:
        return None
    return event if event.run == run else None

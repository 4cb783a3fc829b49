"""What routes of several client protocols share: tables of them, paths that a header assigns to a protocol, plain
answers, and the rejoin of a run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.answers.answer import RunOfAnswer, StreamedAnswer, WholeRunAnswer
from tokenbus_services.gateway.gateway import Gateway, GuardedEndpoint, Handler
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, WholeAnswer
from tokenbus_services.gateway.surfaces.surface import Surface


class HeaderRoute(Route):
    """A route that matches only requests with this header (in lower case)."""

    def __init__(self, path: str, endpoint: GuardedEndpoint, *, header: str, method: str = "GET") -> None:
        super().__init__(path, endpoint, methods=[method])
        self.header = header.encode()

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        if scope["type"] == "http" and any(name == self.header for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    sent = {"x-content-type-options": "nosniff", **(headers or {})}
    return Response(msgspec.json.encode(value), status, sent, media_type="application/json")


def answered(answer: Answer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), media_type=answer.media_type)


def surface_routes(gateway: Gateway, surface: Surface, served: Iterable[tuple[str, Handler, str]]) -> list[BaseRoute]:
    """Routes of a surface. ``served``: path, handler and method of each."""
    return [
        Route(path, gateway.guarded(surface.name, surface.refusal, handle), methods=[method])
        for path, handle, method in served
    ]


def rejoined(
    gateway: Gateway,
    surface: Surface,
    run: str,
    encoder: Callable[[PublicEvent], Encoder],
    *,
    after: int = -1,
    owner: str | None = None,
    events: AsyncGenerator[PublicEvent] | None = None,
) -> StreamedAnswer:
    """The stream of an earlier run: its head is sent at once, and the run continues without its client.

    ``encoder``: as for `StreamedAnswer`. ``after``: the events after this seq. ``owner``: the client's key. ``events``:
    instead of these two.
    """
    how = RunOfAnswer(
        run=run,
        events=events or gateway.follow(surface, run, owner, after=after),
        refusal=surface.refusal,
        times=gateway.times,
        headers=surface.stream_headers,
    )
    return StreamedAnswer(
        how, encoder=encoder, media_type=surface.media_type, keep_alive=surface.keep_alive, early=False
    )


def awaited(
    gateway: Gateway,
    surface: Surface,
    run: str,
    whole: Callable[[PublicEvent], WholeAnswer],
    *,
    events: AsyncGenerator[PublicEvent] | None = None,
) -> WholeRunAnswer:
    """One body after the end of an earlier run, which continues without its client. ``events``: of that run."""
    followed = events or gateway.runs.follow(run)
    how = RunOfAnswer(run=run, events=followed, refusal=surface.refusal, times=gateway.times)
    return WholeRunAnswer(how, whole=whole)

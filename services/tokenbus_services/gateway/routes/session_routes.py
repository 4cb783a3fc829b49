"""What routes share that let a client come back: a table of them, and the rejoin of a run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable

from starlette.routing import BaseRoute, Route

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.answers.answer import RunOfAnswer, StreamedAnswer, WholeRunAnswer
from tokenbus_services.gateway.gateway import Gateway, Handler
from tokenbus_services.gateway.surfaces.contract import Encoder, WholeAnswer
from tokenbus_services.gateway.surfaces.surface import Surface


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

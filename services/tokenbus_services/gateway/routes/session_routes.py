"""What routes share that let a client come back: a table of them, a run under the client's own name, and its rejoin."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.routing import BaseRoute, Route

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.answers.answer import RunOfAnswer, StreamedAnswer, WholeRunAnswer
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway, Handler
from tokenbus_services.gateway.runs import GatewayRun
from tokenbus_services.gateway.sessions import Session, Sessions
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayRequest, Translated, WholeAnswer
from tokenbus_services.gateway.surfaces.surface import Surface


def surface_routes(gateway: Gateway, surface: Surface, served: Iterable[tuple[str, Handler, str]]) -> list[BaseRoute]:
    """Routes of a surface. ``served``: path, handler and method of each."""
    return [
        Route(path, gateway.guarded(surface.name, surface.refusal, handle), methods=[method])
        for path, handle, method in served
    ]


async def publish_named(
    gateway: Gateway,
    surface: Surface,
    caller: Caller,
    asked: GatewayRequest,
    translated: Translated,
    *,
    sessions: Sessions,
    name: str,
    body: bytes = b"",
) -> tuple[GatewayRun, Session | None]:
    """Publish a request, and store its run under the client's ``name``; also returns the session that had the name.

    If it cannot be stored, the run counts as left by its client, because no client could join it. Raises as
    `GatewayRuns.publish` and `Sessions.put` do.
    """
    opened = await gateway.runs.publish(caller, surface, asked, translated)
    try:
        earlier = await sessions.put(caller.tenant, name, Session(opened.id, body))
    except BaseException:
        gateway.runs.client_gone(opened)
        gateway.runs.leave(opened)
        raise
    return opened, earlier


def rejoined(
    gateway: Gateway,
    surface: Surface,
    run: str,
    encoder: Callable[[PublicEvent], Encoder],
    *,
    after: int = -1,
    owner: str | None = None,
) -> StreamedAnswer:
    """The stream of an earlier run: its head is sent at once, and the run continues without its client.

    ``encoder``: as for `StreamedAnswer`. ``after``: the events after this seq. ``owner``: the client's key.
    """
    how = RunOfAnswer(
        run=run,
        events=gateway.follow(surface, run, owner, after=after),
        refusal=surface.refusal,
        times=gateway.times,
        headers=surface.stream_headers,
    )
    return StreamedAnswer(
        how, encoder=encoder, media_type=surface.media_type, keep_alive=surface.keep_alive, early=False
    )


def awaited(
    gateway: Gateway, surface: Surface, run: str, whole: Callable[[PublicEvent], WholeAnswer]
) -> WholeRunAnswer:
    """One body after the end of an earlier run, which continues without its client."""
    how = RunOfAnswer(run=run, events=gateway.runs.follow(run), refusal=surface.refusal, times=gateway.times)
    return WholeRunAnswer(how, whole=whole)

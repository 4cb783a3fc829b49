"""Route: the one stream of a page. What it carries is sampled, so its cost does not depend on what flows."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import structlog
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from tokenbus.bus.liveness import stop_task
from tokenbus.errors import TokenbusError
from tokenbus_services.console.access.session import PATH
from tokenbus_services.console.access.viewer import Viewer
from tokenbus_services.console.http import Desk
from tokenbus_services.console.runs.run_filter import view_of
from tokenbus_services.console.sampler import Sampler, WatchingPage
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.problem import Problem, Refusal

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_PAGES = 200
"""Per gateway."""
CHECK_S = 5.0
"""How often a page's login is checked again."""
_KEEP_ALIVE = b": \n\n"


def routes(desk: Desk, sampler: Sampler) -> list[BaseRoute]:
    """The route."""
    pages = _Pages(desk, sampler)
    return [Route(f"{PATH}/api/stream", desk.view("see_runs", pages.stream), methods=["GET"])]


class _Pages:
    def __init__(self, desk: Desk, sampler: Sampler) -> None:
        self._desk = desk
        self._sampler = sampler
        self._open = 0

    async def stream(self, request: Request, viewer: Viewer) -> Any:
        view = view_of(request.query_params, viewer)
        if self._open >= MAX_PAGES:
            why = f"this gateway serves {MAX_PAGES} pages of the console already"
            raise Refusal(Problem(status=503, code="too_many_pages", message=why, kind="overloaded", retry_after_s=5))
        return _PageStream(self, request, viewer, WatchingPage(view))

    def begin(self, page: WatchingPage) -> None:
        self._open += 1
        self._sampler.join(page)

    def end(self, page: WatchingPage) -> None:
        self._open -= 1
        self._sampler.leave(page)

    async def is_valid(self, request: Request, viewer: Viewer) -> bool:
        """Whether the login is still valid, with the same roles."""
        try:
            return await self._desk.sessions.viewer(request) == viewer
        except Refusal:
            return False
        except TokenbusError:
            return True  # the keys cannot be read now

    @property
    def send_timeout_s(self) -> float:
        return self._desk.gateway.times.send_timeout_s


class _PageStream:
    """ASGI app: sends samples until the page closes, its login ends, or the gateway stops."""

    def __init__(self, pages: _Pages, request: Request, viewer: Viewer, page: WatchingPage) -> None:
        self._pages = pages
        self._request = request
        self._viewer = viewer
        self._page = page

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: asgi.Send) -> None:
        gone = asyncio.create_task(_disconnected(receive), name="watcher of a page")
        self._pages.begin(self._page)
        try:
            await send(asgi.head(200, {**asgi.STREAM_HEADERS, "content-type": "text/event-stream; charset=utf-8"}))
            await self._samples(send, gone)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            pass  # the server stops, and waits for nothing but this; the page opens another stream
        except (TimeoutError, OSError):
            log.info("console_page_dropped", key=self._viewer.name)
        finally:
            self._pages.end(self._page)
            await stop_task(gone)

    async def _samples(self, send: asgi.Send, gone: asyncio.Task[None]) -> None:
        clock = asyncio.get_running_loop().time
        check_at = clock() + CHECK_S
        while not gone.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, check_at - clock())):
                    await self._page.news.wait()
            news = self._page.take()
            events = b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), data) for name, data in news.items())
            if clock() >= check_at:
                if not await self._pages.is_valid(self._request, self._viewer):
                    return
                check_at = clock() + CHECK_S
                events = events or _KEEP_ALIVE
            if events and not gone.done():
                async with asyncio.timeout(self._pages.send_timeout_s):
                    await send({"type": "http.response.body", "body": events, "more_body": True})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

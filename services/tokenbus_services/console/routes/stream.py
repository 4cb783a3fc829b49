"""Route: the one stream of a page. What it carries is sampled, so its cost does not depend on what flows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from tokenbus.errors import TokenbusError
from tokenbus_services.console.access.session import PATH, Viewer
from tokenbus_services.console.http import Desk
from tokenbus_services.console.runs.run_table import view_of
from tokenbus_services.console.sampler import Sampler, WatchingPage
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.net.web_socket import FairShare

MAX_PAGES = 200
"""Per gateway. One key may have as many as remain free for all others."""
CHECK_S = 5.0
"""How often a page's login is checked again."""
_KEEP_ALIVE = b": \n\n"


def routes(desk: Desk, sampler: Sampler) -> list[BaseRoute]:
    pages = _Pages(desk, sampler)
    return [Route(f"{PATH}/api/stream", desk.view("see_runs", pages.stream), methods=["GET"])]


class _Pages:
    def __init__(self, desk: Desk, sampler: Sampler) -> None:
        self._desk = desk
        self._sampler = sampler
        self._open = FairShare(MAX_PAGES)

    async def stream(self, request: Request, viewer: Viewer) -> Any:
        view = view_of(request.query_params, viewer)
        if not self._open.take(viewer.name):
            why = f"this gateway serves {self._open.total} pages of the console, as many as it can for this key"
            raise Refusal(Problem(status=503, code="too_many_pages", message=why, kind="overloaded", retry_after_s=5))
        send_timeout_s = self._desk.gateway.times.send_timeout_s
        samples = self.samples(request, viewer, WatchingPage(view))
        await anext(samples)  # from here on it gives back the page's place
        return asgi.EventStream(samples, broken=_broken, send_timeout_s=send_timeout_s)

    async def samples(self, request: Request, viewer: Viewer, page: WatchingPage) -> AsyncGenerator[bytes]:
        """Samples until the viewer's login ends."""
        clock = asyncio.get_running_loop().time
        check_at = clock() + CHECK_S
        self._sampler.join(page)
        try:
            yield _KEEP_ALIVE
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.01, check_at - clock())):
                        await page.news.wait()
                news = page.take()
                events = b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), data) for name, data in news.items())
                if clock() >= check_at:
                    if not await self._is_valid(request, viewer):
                        return
                    check_at = clock() + CHECK_S
                    events = events or _KEEP_ALIVE
                if events:
                    yield events
        finally:
            self._open.give_back(viewer.name)
            self._sampler.leave(page)

    async def _is_valid(self, request: Request, viewer: Viewer) -> bool:
        """Whether the login is still valid, with the same roles."""
        try:
            return await self._desk.sessions.viewer(request) == viewer
        except Refusal:
            return False
        except TokenbusError:
            return True  # the keys cannot be read now


def _broken(problem: Problem) -> bytes:
    return b"event: broken\ndata: " + msgspec.json.encode({"code": problem.code}) + b"\n\n"

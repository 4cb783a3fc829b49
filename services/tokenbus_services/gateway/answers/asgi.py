"""Heads and bodies of answers, as ASGI messages: those of event streams, of whole answers, and what a problem adds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import structlog

from tokenbus.bus.liveness import stop_task
from tokenbus.errors import TokenbusError
from tokenbus_services.gateway.problem import Problem, Refusal, defect, of_exception, restarting
from tokenbus_services.gateway.surfaces.contract import Answer
from tokenbus_services.net.http_server import ENDLESS

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LAST_WORDS_S = 1.0
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_HEADERS: Mapping[str, str] = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
"""Proxies must not cache, compress or buffer a stream."""


def headers_of(problem: Problem) -> dict[str, str]:
    """The headers that say whether and when a client should retry."""
    headers = {"x-should-retry": "true" if problem.should_retry else "false"}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(problem.retry_after_s))
        headers["retry-after-ms"] = str(round(problem.retry_after_s * 1000))
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return {**headers, **problem.headers}


def head(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """The message that begins an answer."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def send_answer(send: Send, answer: Answer, headers: Mapping[str, str]) -> None:
    await send(
        head(
            answer.status,
            {
                "content-type": answer.media_type,
                "content-length": str(len(answer.body)),
                "x-content-type-options": "nosniff",
                **headers,
                **answer.headers,
            },
        )
    )
    await send({"type": "http.response.body", "body": answer.body})


class EventStream:
    """ASGI app: a stream of server-sent events that belongs to no single run. Its end is never silent.

    It ends with its lines, with the client, or with the words of ``broken``: if the lines fail, or the server stops.
    """

    def __init__(
        self,
        lines: AsyncGenerator[bytes],
        *,
        broken: Callable[[Problem], bytes],
        send_timeout_s: float,
        headers: Mapping[str, str] = STREAM_HEADERS,
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        self._lines = lines
        self._broken = broken
        self._send_timeout_s = send_timeout_s
        self._headers = {**headers, "content-type": media_type}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if task := asyncio.current_task():
            task.set_name(ENDLESS)
        await send(head(200, self._headers))
        if scope["method"] == "HEAD":
            await self._lines.aclose()
            await send({"type": "http.response.body", "body": b""})
            return
        writing = asyncio.create_task(self._write(send), name="writer of a stream")
        gone = asyncio.create_task(disconnected(receive), name="watcher of a client")
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                return
            words = _words(self._broken, writing)
        except asyncio.CancelledError:  # the server stops, and waits for nothing but this task
            words = self._broken(restarting())
        finally:
            await stop_task(writing)
            await stop_task(gone)
            await self._lines.aclose()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await send({"type": "http.response.body", "body": words})

    async def _write(self, send: Send) -> None:
        async for data in self._lines:
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})


def _words(broken: Callable[[Problem], bytes], writing: asyncio.Task[None]) -> bytes:
    """The end of a stream whose writer has ended."""
    match writing.exception():
        case None | TimeoutError() | OSError():  # the client reads nothing, or has gone
            return b""
        case Refusal() as e:
            return broken(e.problem)
        case TokenbusError() as e:
            return broken(of_exception(e))
        case e:
            log.error("stream_failed", exc_info=e)
            return broken(defect())


async def disconnected(receive: Any) -> None:
    """Wait until the client has left; its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

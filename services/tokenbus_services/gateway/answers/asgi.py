"""Heads and bodies of answers, as ASGI messages: those of event streams, of whole answers, and what a problem adds."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import Answer

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
    """Send a whole answer."""
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

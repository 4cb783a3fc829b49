"""Frees a response of httpx when it is closed, and not when Python's collector finds it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
from httpx import USE_CLIENT_DEFAULT


class FreeingClient(httpx.AsyncClient):
    """httpx's client, whose responses are freed once they are closed and no longer used.

    httpx's response and its stream refer to each other (httpx/_client.py, `BoundAsyncStream`). So a closed response
    would stay until the collector finds it, with its request, its connection and the buffers of both; and the collector
    looks at old objects seldom.
    """

    async def send(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: Any = USE_CLIENT_DEFAULT,
        follow_redirects: Any = USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        response = await super().send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
        if response.is_closed:
            response.stream = httpx.ByteStream(b"")
        else:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _DroppedWhenClosed(response.stream)
        return response


class _DroppedWhenClosed(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        stream, self._stream = self._stream, httpx.ByteStream(b"")
        await stream.aclose()

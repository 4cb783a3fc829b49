"""Streamable HTTP transport to an MCP server, with bounded responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx2
from mcp.client.streamable_http import streamable_http_client

from tokenbus_services.net.egress import PORTS, Egress

if TYPE_CHECKING:
    # Not public, so not imported at run time.
    from mcp.client._transport import TransportStreams

CONNECT_S = 10.0


@asynccontextmanager
async def endpoint(
    url: str, headers: Callable[[], Mapping[str, str]], egress: Egress, *, message_bytes: int
) -> AsyncGenerator[TransportStreams]:
    """Open the transport. Redirects must stay within the URL's origin and ``egress``. A message over the limit fails
    the request that it answers. ``headers`` is called for each request.
    """

    async def authorize(request: httpx2.Request) -> None:
        request.headers.update({**headers(), "Accept-Encoding": "identity"})

    async def bound(response: httpx2.Response) -> None:
        # The package limits events, but not single responses or their decompressed size.
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("the response is compressed, which was not requested")
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, message_bytes)

    async with (
        httpx2.AsyncClient(
            transport=_Guarded(egress),
            # Each call has its own timeout, and an event stream may be silent for long.
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            event_hooks={"request": [authorize], "response": [bound]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=message_bytes) as streams,
    ):
        yield streams


class _Guarded(httpx2.AsyncHTTPTransport):
    """`GuardedTransport` for the package's HTTP client. It has one host, so one pool is enough."""

    def __init__(self, egress: Egress) -> None:
        super().__init__()
        self._egress = egress

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        timeout = request.extensions.get("timeout", {}).get("connect")
        try:
            addresses = await self._egress.addresses(url.host, url.port or PORTS[url.scheme], timeout=timeout)
        except TimeoutError as e:
            raise httpx2.ConnectTimeout(f"no address of {url.host} in time", request=request) from e
        except OSError as e:
            raise httpx2.ConnectError(str(e), request=request) from e
        for address in addresses[:-1]:
            try:
                return await super().handle_async_request(_to(address, request))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue  # nothing was sent yet
        return await super().handle_async_request(_to(addresses[-1], request))


def _to(address: str, request: httpx2.Request) -> httpx2.Request:
    """The same request, sent to this address under its original host name."""
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


class _Bounded(httpx2.AsyncByteStream):
    """A body that raises an error if it exceeds a limit."""

    def __init__(self, body: httpx2.AsyncByteStream, limit: int) -> None:
        self._body = body
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._body:
            left -= len(chunk)
            if left < 0:
                raise httpx2.StreamError(f"over {self._limit} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()

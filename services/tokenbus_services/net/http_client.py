"""httpx's client and transport as the services use them: response heads are limited, and bodies cost few wake-ups."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx
from httpx import USE_CLIENT_DEFAULT

from tokenbus_services.net.connection import Backend, Connection

# At the start and end of every request, httpcore scans all connections of a pool and makes a system call for each idle
# one (httpcore/_async/connection_pool.py, `_assign_requests_to_connections`). With a thousand concurrent calls this
# dominates the cost of a call.


AT_ONCE = 4
"""Maximum concurrent calls per pool."""
KEPT_S = 5.0
"""A pool without calls for this long is closed; httpcore keeps a single idle connection as long."""


class _Pool:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.calls = 0
        self.left_at = 0.0

    def leave(self) -> None:
        self.calls -= 1
        self.left_at = time.monotonic()


class _Answer(httpx.AsyncByteStream):
    """A response body that notifies its pool when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._stream = stream
        self._pool: _Pool | None = pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if self._pool:
                self._pool.leave()
                self._pool = None


class Pools(httpx.AsyncBaseTransport):
    """As many transports as the current calls need, `AT_ONCE` calls each; the first with room gets the next call."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        """``make`` creates a transport with its own pool. Its exceptions propagate."""
        self._make = make
        self._pools = [_Pool(make())]

    def __len__(self) -> int:
        return len(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = next((pool for pool in self._pools if pool.calls < AT_ONCE), None)
        if pool is None:
            pool = _Pool(self._make())
            self._pools.append(pool)
        pool.calls += 1
        try:
            await self._close_idle()
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            pool.leave()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Answer(response.stream, pool)
        return response

    async def _close_idle(self) -> None:
        before = time.monotonic() - KEPT_S
        while not self._pools[-1].calls and self._pools[-1].left_at < before and len(self._pools) > 1:
            await self._pools.pop().transport.aclose()

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.transport.aclose()


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


class BoundedClient(FreeingClient):
    """httpx's client with limited response heads, except through a SOCKS proxy. Designed for many concurrent calls
    (`Pools`).
    """

    def _init_transport(  # noqa: PLR0917 (the parameters are httpx's)
        self,
        verify: ssl.SSLContext | str | bool = True,
        cert: Any = None,
        trust_env: bool = True,
        http1: bool = True,
        http2: bool = False,
        limits: httpx.Limits = httpx.Limits(),  # noqa: B008
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> httpx.AsyncBaseTransport:
        if transport:
            return transport
        context = httpx.create_ssl_context(verify, cert, trust_env)
        return Pools(lambda: BoundedTransport(context, limits=limits))

    def _init_proxy_transport(  # noqa: PLR0917 (the parameters are httpx's)
        self,
        proxy: httpx.Proxy,
        verify: ssl.SSLContext | str | bool = True,
        cert: Any = None,
        trust_env: bool = True,
        http1: bool = True,
        http2: bool = False,
        limits: httpx.Limits = httpx.Limits(),  # noqa: B008
    ) -> httpx.AsyncBaseTransport:
        context = httpx.create_ssl_context(verify, cert, trust_env)
        if proxy.url.scheme in ("http", "https"):
            return Pools(lambda: BoundedTransport(context, limits=limits, proxy=proxy))
        return Pools(lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits, proxy=proxy))


class BoundedTransport(httpx.AsyncHTTPTransport):
    """httpx's transport with limited response heads. Violations raise httpx.RemoteProtocolError, caused by
    HeadRefused.
    """

    def __init__(
        self, ssl_context: ssl.SSLContext | None = None, *, limits: httpx.Limits, proxy: httpx.Proxy | None = None
    ) -> None:
        # httpx itself has no parameter for the network backend.
        bounded: dict[str, Any] = {
            "ssl_context": ssl_context or httpx.create_ssl_context(),
            "max_connections": limits.max_connections,
            "max_keepalive_connections": limits.max_keepalive_connections,
            "keepalive_expiry": limits.keepalive_expiry,
            "network_backend": Backend(),
        }
        if proxy is None:
            self._pool = httpcore.AsyncConnectionPool(**bounded)
        else:
            self._pool = httpcore.AsyncHTTPProxy(
                proxy_url=str(proxy.url),
                proxy_auth=proxy.raw_auth,
                proxy_headers=proxy.headers.raw,
                proxy_ssl_context=proxy.ssl_context,
                **bounded,
            )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        connection = response.extensions.get("network_stream")
        if isinstance(connection, Connection) and connection.at_body and _is_chunked(request, response):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            timeout_s = request.extensions.get("timeout", {}).get("read")
            response.stream = ChunkedBody(response.stream, connection, timeout_s=timeout_s)
        return response


def _is_chunked(request: httpx.Request, response: httpx.Response) -> bool:
    """Whether the answer has a body in plain chunks (RFC 9112, section 6.3)."""
    if request.method in ("HEAD", "CONNECT") or response.status_code < 200 or response.status_code in (204, 304):
        return False
    return [coding.lower() for coding in response.headers.get_list("transfer-encoding")] == ["chunked"]


@contextmanager
def reset_as_made(request: httpx.Request) -> Generator[None]:
    """Wrap the sending of a request over httpx. Raises httpx.ConnectError if the connection was reset while connecting.

    uvloop has already dropped the socket when anyio asks for its peer name, which raises an AttributeError instead of a
    network error (similar: MagicStack/uvloop#560).
    """
    try:
        yield
    except AttributeError as e:
        if e.name != "getpeername":
            raise
        raise httpx.ConnectError("the connection was reset while connecting", request=request) from e


# A provider sends each event as an HTTP chunk of its own, and one packet holds many. The HTTP library returns them one
# by one through seven layers, which costs a fetcher more than everything else that it does with an event. Here one read
# is one piece. The library handles the end of the body and all that is not plain chunks, with its own errors.


READ_BYTES = 64 * 1024
"""Maximum bytes decoded at once: thousands of chunks of one byte each must not hold up the others."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_SIZE_BYTES = 17
"""A longer line is not a plain chunk size."""


class ChunkDecoder:
    """Decodes plain chunks (RFC 9112, section 7.1). No IO."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the current chunk's data that are still to come."""
        self._in_chunk = False
        self._held = b""
        """The beginning of a line."""
        self.rest: bytes | None = None
        """Set when the decoder is done: bytes that begin at a chunk's size and are not decoded, because the body ends
        there or is not made of plain chunks.
        """
        self.malformed: bytes | None = None
        """Set, besides `rest`, if a chunk is not followed by the end of a line: what follows it."""

    def feed(self, data: bytes) -> bytes:
        """Return the content of these bytes. Not to be called once `rest` is set."""
        data, self._held = self._held + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while True:
            if self._in_chunk:
                end = at + self._left
                if end > at:
                    pieces.append(data[at:end])
                self._left = max(0, end - size)
                if end >= size:
                    break
                if data[end : end + 2] != b"\r\n":
                    if data[end:] == b"\r":
                        self._held = b"\r"
                    else:
                        self.malformed, self.rest = data[end : end + 2], b""
                    break
                self._in_chunk = False
                at = end + 2
            line = _SIZE.match(data, at)
            if line is None:
                if b"\n" in data[at : at + _SIZE_BYTES] or size - at >= _SIZE_BYTES:
                    self.rest = data[at:]
                else:
                    self._held = data[at:]
                break
            self._left = int(line[1], 16)
            if not self._left:
                self.rest = data[at:]
                break
            self._in_chunk = True
            at = line.end()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stop(self) -> None:
        """Decode nothing more: sets `rest`. In the middle of a chunk it begins with the size of what is missing."""
        if self.rest is None:
            self.rest = b"%x\r\n" % self._left if self._in_chunk and self._left else self._held


class ChunkedBody(httpx.AsyncByteStream):
    """The body of a chunked answer whose connection stands right behind the head."""

    def __init__(self, body: httpx.AsyncByteStream, connection: Connection, *, timeout_s: float | None) -> None:
        """``body``: as the HTTP library reads it. ``timeout_s``: longest wait for one read."""
        self._body = body
        self._connection = connection
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        """Raises httpx.TransportError."""
        decoder = ChunkDecoder()
        while decoder.rest is None:
            try:
                data = await self._connection.read(READ_BYTES, self._timeout_s)
                if data:
                    data = decoder.feed(data)
                else:
                    decoder.stop()
            except httpcore.ReadTimeout as e:
                raise httpx.ReadTimeout(str(e)) from e
            except httpcore.ReadError as e:
                raise httpx.ReadError(str(e)) from e
            if data:
                yield data
        if decoder.malformed is not None:
            raise httpx.RemoteProtocolError(f"malformed chunk footer: {decoder.malformed!r}")
        self._connection.unread(decoder.rest)
        async for data in self._body:
            yield data

    async def aclose(self) -> None:
        await self._body.aclose()


# Reads untrusted bodies in pieces of any size without starving the rest of the process.

CRUMB_BYTES = 4
MAX_CRUMBS = 20_000
"""After this many reads, an average below `CRUMB_BYTES` is an error: each read costs as much as a whole event."""
FAIR_READS = 16
"""Yield to other tasks after this many reads: those of a body that has arrived already never wait."""
FAIR_S = 0.002
"""Yield also after this much work on them. If a read needs more, the next ones are passed on in smaller parts."""
FIRST_PART_BYTES, LEAST_PART_BYTES = 16 * 1024, 1024


class TooManyCrumbs(Exception):
    """The body arrives in too many small reads."""

    def __init__(self, reads: int) -> None:
        super().__init__(f"the response came in {reads} pieces averaging less than {CRUMB_BYTES} bytes")


async def fair_reads(reads: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Pass on the reads, yielding to other tasks regularly, however much work each byte is. Raises TooManyCrumbs, and
    any exception of ``reads``.
    """
    clock = time.thread_time  # time in which another process has the core is no work
    size = count = 0
    most, spent = FIRST_PART_BYTES, 0.0
    async for read in reads:
        size += len(read)
        count += 1
        if count > MAX_CRUMBS and size < count * CRUMB_BYTES:
            raise TooManyCrumbs(count)
        at = 0
        while at < len(read):
            part = read[at : at + most]
            at += len(part)
            begun = clock()
            yield part
            took = clock() - begun
            spent += took
            if took > FAIR_S:
                most = max(LEAST_PART_BYTES, int(len(part) * FAIR_S / took))
            elif len(part) == most < READ_BYTES:
                most *= 2
            if spent > FAIR_S or count % FAIR_READS == 0:
                spent = 0.0
                await asyncio.sleep(0)

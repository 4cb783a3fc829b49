"""httpx's client for provider calls, blobs and tools, over a transport of its own.

httpx's transport goes through httpcore, anyio and h11: seven layers for each read, a lock and several contexts for each
call, and a scan of all connections whenever a call begins or ends. Here an answer is parsed by llhttp (`httptools`), as
it is read. What a peer can do raises the same errors as there, but bounded: tests/services/net compares both.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, cast
from urllib.request import getproxies, proxy_bypass
from weakref import WeakSet

import httpx
from httptools import HttpParserError, HttpResponseParser
from httpx import USE_CLIENT_DEFAULT

from tokenbus.bus import process_clock
from tokenbus_services.net.connection import READ_BYTES, Connection, connect

KEPT_S = 5.0
"""How long an idle connection is kept."""
MAX_HEADERS = 256
"""Maximum headers of one answer. Providers send 20 to 60."""
MAX_INTERIM = 16
"""Maximum interim answers (1xx) before the final one."""
MAX_FRAMING_BYTES = 100 * 1024
"""Maximum bytes without content: of a head, an extension of a chunk, or the trailers."""
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_BODY = "tokenbus.body"
"""The extension of a response that holds its body, without httpx's layers."""
_TOKEN = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+")
_VALUE = re.compile(rb"[^\x00\r\n]*")
_TARGET = re.compile(rb"[\x21-\x7e]+")


class HeadRefused(httpx.RemoteProtocolError):
    """An answer's head exceeds a limit."""


class Answer(httpx.AsyncByteStream):
    """One answer on a connection: its head, then its body. Parsed as it is read, so that errors keep their place."""

    def __init__(
        self, connection: Connection, *, bodiless: bool, timeout_s: float | None, keep: Callable[[Connection], None]
    ) -> None:
        """``bodiless``: it has no body, whatever its head says. ``timeout_s``: longest wait for one read. ``keep`` gets
        the connection after the end, if it can be used again.
        """
        self.status = 0
        """Set once the head is complete."""
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.reusable = False
        self.sent_whole = True
        """Whether the peer took all of the request."""
        self._connection: Connection | None = connection
        self._bodiless = bodiless
        self._timeout_s = timeout_s
        self._keep = keep
        self._complete = self._until_close = False
        self._error: httpx.TransportError | None = None
        self._framing = self._interim = 0
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser = HttpResponseParser(self)
        # As httpx, which some servers need.
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True, lenient_spaces_after_chunk_size=True)

    async def head(self) -> None:
        """Read the head. Raises httpx.TransportError, HeadRefused."""
        while not self.status:
            await self._read()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        """The content of one read. Raises httpx.TransportError."""
        pieces = self._pieces
        while not pieces:
            if self._complete:
                raise StopAsyncIteration
            await self._read()
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return data

    async def aclose(self) -> None:
        """Give the connection back if the whole answer was read. Close it at once otherwise."""
        self.leave()

    def leave(self) -> None:
        """As `aclose`."""
        if connection := self._connection:
            self._connection = None
            del self._parser  # refers to this
            if self._complete and self.reusable and self.sent_whole:
                self._keep(connection)
            else:
                connection.close()

    async def _read(self) -> None:
        if self._error or self._connection is None:
            raise self._error or httpx.ReadError("the answer is closed")
        data = await self._connection.read(self._timeout_s)
        if data:
            self._feed(data)
        elif self._until_close:
            self._complete = True
        elif self.status:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
        else:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    def _feed(self, data: bytes) -> None:
        error: httpx.TransportError | None = None
        try:
            self._parser.feed_data(data)
        except HttpParserError as e:
            refused = isinstance(e.__context__, httpx.TransportError)
            error = cast(httpx.TransportError, e.__context__) if refused else httpx.RemoteProtocolError(str(e))
        self._framing = 0 if self._pieces else self._framing + len(data)
        if self._framing > MAX_FRAMING_BYTES:
            kind = httpx.RemoteProtocolError if self.status else HeadRefused
            error = error or kind(f"over {MAX_FRAMING_BYTES} bytes")
        if self._bodiless and self._pieces:
            self._pieces.clear()
            self.reusable = False
        if not self._complete:
            self._error = error  # after the content before it
        elif error:
            self.reusable = False

    # What follows is called by the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            raise httpx.RemoteProtocolError("a second answer")

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        if len(self.headers) == MAX_HEADERS:
            raise HeadRefused(f"over {MAX_HEADERS} headers")
        self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not _VALUE.fullmatch(self.reason):
            raise httpx.RemoteProtocolError("malformed reason phrase")
        if status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise HeadRefused(f"over {MAX_INTERIM} interim responses")
            if status < 100 or status == 101:
                raise httpx.RemoteProtocolError(f"status {status}")
            self.headers.clear()
            self.reason = b""
            return
        codings = [value.lower() for name, value in self.headers if name.lower() == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise httpx.RemoteProtocolError("Only Transfer-Encoding: chunked is supported")
        self.status = status
        self._until_close = not codings and all(name.lower() != b"content-length" for name, _ in self.headers)
        if self._bodiless:
            self.on_message_complete()

    def on_message_complete(self) -> None:
        if self.status and not self._complete:
            self._complete = True
            self.reusable = self._parser.should_keep_alive()


def head_of(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a request. Raises httpx.LocalProtocolError, which repeats no value, for what would end it early."""
    if not (_TOKEN.fullmatch(method) and _TARGET.fullmatch(target)):
        raise httpx.LocalProtocolError("Illegal method or target")
    lines = [b"%b %b HTTP/1.1\r\n" % (method, target)]
    for name, value in headers:
        if not (_TOKEN.fullmatch(name) and _VALUE.fullmatch(value)):
            raise httpx.LocalProtocolError("Illegal header value")
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join((*lines, b"\r\n"))


async def _send(connection: Connection, head: bytes, request: httpx.Request, timeout_s: float | None) -> bool:
    """Write the request. Returns whether the peer took all of it: it may refuse a body early, and close its side.

    Raises httpx.WriteTimeout; httpx.LocalProtocolError if the body is not as long as its header says.
    """
    chunked = "transfer-encoding" in request.headers
    left = int(request.headers.get("content-length", 0))
    try:
        async for piece in cast(httpx.AsyncByteStream, request.stream):
            if chunked and piece:
                data = b"%x\r\n%b\r\n" % (len(piece), piece)
            else:
                data, left = piece, left - len(piece)
            if left < 0:
                raise httpx.LocalProtocolError("Too much data for declared Content-Length")
            if head and len(data) > READ_BYTES:
                await connection.write(head, timeout_s)
                head = b""
            if head or data:
                await connection.write(head + data, timeout_s)
                head = b""
        if left:
            raise httpx.LocalProtocolError("Too little data for declared Content-Length")
        if rest := head + (b"0\r\n\r\n" if chunked else b""):
            await connection.write(rest, timeout_s)
    except httpx.WriteError:
        return False
    return True


@lru_cache(1)
def _trust(file: str | None, directory: str | None) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def trust() -> ssl.SSLContext:
    """The machine's certificate authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR. They are loaded once, when the
    first connection needs them: that costs 30 ms and 1 MB.
    """
    return _trust(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


_Place = tuple[str, str, int]


class Transport(httpx.AsyncBaseTransport):
    """httpx's transport over HTTP/1.1, with limited heads. Its calls share idle connections, of which it keeps each for
    `KEPT_S`; their number has no limit.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None = None, *, environment: bool = False) -> None:
        """``environment``: whether its proxies are used, HTTP or SOCKS 5."""
        self._ssl_context = ssl_context
        proxies = getproxies() if environment else {}
        self._proxies = {
            scheme: httpx.Proxy(url if "://" in url else f"http://{url}")
            for scheme, url in proxies.items()
            if url and scheme in ("http", "https", "all")
        }
        self._idle: dict[_Place, list[Connection]] = {}
        self.connections: WeakSet[Connection] = WeakSet()
        """All that are open, and those that are not freed yet."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError, HeadRefused, and any exception of the request's body."""
        url = request.url
        if url.scheme not in ("http", "https"):
            raise httpx.UnsupportedProtocol("the URL must start with http:// or https://")
        host = url.raw_host.decode("ascii")
        timeouts = cast("dict[str, float | None]", request.extensions.get("timeout", {}))
        place = (url.scheme, host, url.port or PORTS[url.scheme])
        proxy = self._proxy(url.scheme, host)
        target, headers = url.raw_path, request.headers.raw
        if proxy and url.scheme == "http" and proxy.url.scheme in ("http", "https"):
            target = b"http://" + url.netloc + target
            headers = [*_proxy_headers(proxy), *headers]
        method = request.method.encode("ascii")
        head = head_of(method, target, headers)
        connection = await self._kept(place) or await self._connected(place, proxy, timeouts.get("connect"))
        answer = Answer(
            connection,
            bodiless=method == b"HEAD",
            timeout_s=timeouts.get("read"),
            keep=partial(self._keep, place),
        )
        try:
            answer.sent_whole = await _send(connection, head, request, timeouts.get("write"))
            await answer.head()
        except BaseException:
            answer.leave()
            raise
        extensions = {"http_version": b"HTTP/1.1", "reason_phrase": answer.reason, _BODY: answer}
        return httpx.Response(answer.status, headers=answer.headers, stream=answer, extensions=extensions)

    async def aclose(self) -> None:
        """Close all connections."""
        for connection in [*self.connections]:
            connection.close()
        await asyncio.sleep(0)

    async def hosts(self, host: str, port: int) -> Sequence[str]:
        """Where to connect to: names, or addresses."""
        return (host,)

    def _proxy(self, scheme: str, host: str) -> httpx.Proxy | None:
        proxy = self._proxies.get(scheme) or self._proxies.get("all")
        return None if proxy is None or proxy_bypass(host) else proxy

    async def _connected(self, place: _Place, proxy: httpx.Proxy | None, timeout_s: float | None) -> Connection:
        scheme, host, port = place
        connection = None
        try:
            async with process_clock.timeout(timeout_s):
                if proxy is None:
                    connection = await connect(await self.hosts(host, port), port)
                else:
                    at, secure = proxy.url, proxy.url.scheme == "https"
                    connection = await connect((at.host,), at.port or PORTS[at.scheme])
                    if secure:
                        await connection.start_tls(proxy.ssl_context or self._ssl_context or trust(), at.host)
                    if at.scheme not in ("http", "https"):
                        await _through_socks(connection, host, port, proxy.raw_auth)
                    elif scheme == "https":
                        await _through_http(connection, host, port, proxy)
                if scheme == "https":
                    await connection.start_tls(self._ssl_context or trust(), host)
        except BaseException as e:
            if connection:
                connection.close()
            if isinstance(e, TimeoutError):
                raise httpx.ConnectTimeout(str(e)) from e
            if isinstance(e, OSError):  # ssl.SSLError is one
                raise httpx.ConnectError(str(e)) from e
            raise
        self.connections.add(connection)
        return connection

    async def _kept(self, place: _Place) -> Connection | None:
        idle = self._idle.get(place, [])
        if idle:
            await asyncio.sleep(0)  # a peer may have closed its side already
        while idle:
            connection = idle.pop()
            assert connection.expiry
            connection.expiry.cancel()
            if connection.is_silent:
                return connection
            connection.close()
        return None

    def _keep(self, place: _Place, connection: Connection) -> None:
        if connection.is_silent:
            self._idle.setdefault(place, []).append(connection)
            loop = asyncio.get_running_loop()
            connection.expiry = loop.call_later(KEPT_S, self._expire, place, connection)
        else:
            connection.close()

    def _expire(self, place: _Place, connection: Connection) -> None:
        connection.close()
        idle = self._idle[place]
        idle.remove(connection)
        if not idle:
            del self._idle[place]


def _proxy_headers(proxy: httpx.Proxy) -> list[tuple[bytes, bytes]]:
    if proxy.raw_auth is None:
        return proxy.headers.raw
    return [(b"Proxy-Authorization", b"Basic " + b64encode(b":".join(proxy.raw_auth))), *proxy.headers.raw]


async def _through_http(connection: Connection, host: str, port: int, proxy: httpx.Proxy) -> None:
    """Have the proxy connect to this host. Raises httpx.TransportError."""
    target = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode("ascii")
    headers = [(b"Host", target), (b"Accept", b"*/*"), *_proxy_headers(proxy)]
    await connection.write(head_of(b"CONNECT", target, headers))
    answer = Answer(connection, bodiless=True, timeout_s=None, keep=lambda connection: None)
    await answer.head()
    if not 200 <= answer.status < 300:
        raise httpx.ProxyError(f"{answer.status} {answer.reason.decode('ascii', errors='ignore')}")


async def _through_socks(connection: Connection, host: str, port: int, auth: tuple[bytes, bytes] | None) -> None:
    """Have the proxy resolve this host and connect to it (RFC 1928, RFC 1929). Raises httpx.TransportError."""

    async def received(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (read := await connection.read()):
                raise httpx.ProxyError("the proxy closed the connection")
            data += read
        connection.unread(data[count:])
        return data[:count]

    way = 2 if auth else 0
    await connection.write(bytes((5, 1, way)))
    if await received(2) != bytes((5, way)):
        raise httpx.ProxyError("the proxy wants another authentication")
    if auth:
        name, password = auth
        await connection.write(b"\x01%c%b%c%b" % (len(name), name, len(password), password))
        if (await received(2))[1]:
            raise httpx.ProxyError("the proxy refuses the user name or the password")
    await connection.write(b"\x05\x01\x00\x03%c%b%b" % (len(host), host.encode("ascii"), port.to_bytes(2)))
    _, failure, _, kind = await received(4)
    if failure:
        raise httpx.ProxyError(f"the proxy cannot connect: SOCKS error {failure}")
    await received({1: 4, 4: 16}.get(kind) or (await received(1))[0])
    await received(2)


class Client(httpx.AsyncClient):
    """httpx's client over `Transport`; without another one, through the proxies of the environment.

    Its responses are freed once they are closed and no longer used. httpx's response and its stream refer to each other
    (httpx/_client.py, `BoundAsyncStream`), so a closed response would stay until the collector finds it, with its
    request; and the collector looks at old objects seldom. Here the stream is the transport's own.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, **options: Any) -> None:
        """``options``: as httpx's; those about connections have no effect."""
        super().__init__(transport=transport or Transport(environment=True), **options)

    async def send(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: Any = USE_CLIENT_DEFAULT,
        follow_redirects: Any = USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        response = await super().send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
        body = response.extensions.pop(_BODY, response.stream)
        response.stream = httpx.ByteStream(b"") if response.is_closed else body
        return response


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

"""Limits response heads before the HTTP library parses them: number of headers and of interim responses.

The library limits only a head's bytes. 100 KB hold 25,000 headers, and interim responses (1xx) may repeat without end.
Parsing either blocks all other calls of the process.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from typing import Any, cast

import httpcore
import httpx

from tokenbus_services.net.connection_pools import Pools

MAX_HEADERS = 256
"""Maximum headers of one response. Providers send 20 to 60."""
MAX_INTERIM = 16
"""Maximum interim responses before the final one."""

_END = re.compile(rb"\n\r?\n")
_STATUS = len(b"HTTP/1.1 ")

_SocketOptions = Iterable[tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]]


class HeadRefused(httpcore.RemoteProtocolError):
    """A response head exceeds a limit."""


class HeadBound:
    """Checks the response heads of one connection. Call `begin` with each request and `feed` with all data read."""

    def __init__(self) -> None:
        self._head: bytearray | None = None
        self._interim = 0

    def begin(self) -> None:
        """Expect a response."""
        self._head = bytearray()
        self._interim = 0

    def feed(self, data: bytes) -> None:
        """Check data that was read. Raises HeadRefused."""
        if self._head is None:
            return
        self._head += data
        while len(self._head) > _STATUS:
            end = _END.search(self._head)
            if self._head.count(b"\n", 0, end.end() if end else len(self._head)) > MAX_HEADERS + 2:
                raise HeadRefused(f"over {MAX_HEADERS} headers")
            if not self._head.startswith(b"1", _STATUS):
                if end:
                    self._head = None
                return
            if end is None:
                return
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise HeadRefused(f"over {MAX_INTERIM} interim responses")
            del self._head[: end.end()]


class BoundedClient(httpx.AsyncClient):
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
            "network_backend": _Backend(),
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


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self._backend = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _SocketOptions | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._backend.connect_tcp(host, port, timeout, local_address, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._bound = HeadBound()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._bound.feed(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._bound.begin()
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

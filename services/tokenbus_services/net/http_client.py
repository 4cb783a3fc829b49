"""httpx's client and transport as the services use them: response heads are limited, and bodies cost few wake-ups."""

from __future__ import annotations

import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

from tokenbus_services.net.chunked_body import ChunkedBody
from tokenbus_services.net.connection import Backend, Connection
from tokenbus_services.net.connection_pools import FreeingClient, Pools


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

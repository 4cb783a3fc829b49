"""Keeps web pages of others away from a service that runs beside a browser.

A page of any site can make the browser of whoever looks at it send requests to 127.0.0.1 or into the network behind it,
and by a name that it points there (DNS rebinding) can read the answers too. A browser says where a request comes from:
in ``Sec-Fetch-Site`` and ``Origin`` for what writes, and in ``Host`` by which name it was sent. Programs send no such
headers but ``Host``, which is an address or a name that the deployment knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_log = structlog.stdlib.get_logger()


class Refusal(msgspec.Struct, frozen=True):
    """The body of the answer to a request that was turned away."""

    code: str
    message: str


class RequestGuard:
    """An ASGI app in front of another: what writes must not come from a page of another site, nor by a foreign name."""

    def __init__(self, app: AsgiApp, *, hosts: Iterable[str] = (), private: Sequence[str] = ()) -> None:
        """``hosts``: names by which the service is reached beside addresses and ``localhost``. ``private``: paths
        beneath which ``Host`` counts for reads too."""
        self.app = app
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._private = tuple(private)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, problem = refusal
        _log.warning("http_request_refused", code=problem.code, method=scope["method"])
        body = msgspec.json.encode(problem)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[HTTPStatus, Refusal] | None:
        writes = scope["method"] not in _READS
        path: str = scope["path"]
        if not writes and not any(path == p or path.startswith(f"{p}/") for p in self._private):
            return None
        given: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        host = given.get("host", [])
        if len(host) != 1 or not self._known(host[0]):
            return HTTPStatus.MISDIRECTED_REQUEST, Refusal(
                "host_refused", "Host is no address and no name of this service; http.hosts in the settings adds names"
            )
        if writes and any(site not in {"same-origin", "none"} for site in given.get("sec-fetch-site", [])):
            return HTTPStatus.FORBIDDEN, Refusal("cross_site", "the request comes from a page of another site")
        if writes and any(not _same(origin, host[0]) for origin in given.get("origin", [])):
            return HTTPStatus.FORBIDDEN, Refusal("cross_site", "Origin is another than the service's own")
        return None

    def _known(self, host: str) -> bool:
        """A name that somebody else may point here is not known; an address points where it says."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        name = name.rstrip(".")
        return name == "localhost" or name.endswith(".localhost") or name in self._hosts or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    scheme, _, place = origin.partition("://")
    return scheme in {"http", "https"} and place.lower() == host.lower()

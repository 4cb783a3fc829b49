"""Protects a service that runs beside a browser from web pages of other sites.

Any web page can make its visitor's browser send requests to 127.0.0.1 or to the local network, and with DNS rebinding
it can also read the responses. Browsers identify the origin of a request: ``Sec-Fetch-Site`` and ``Origin`` for writes,
``Host`` for the name used. Other programs send only ``Host``, which is an address or a name known to the deployment.
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

PAGES = ("/health", "/ready", "/metrics", "/asyncapi", "/asyncapi.json")
"""Of every service."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_log = structlog.stdlib.get_logger()


class GuardRefusal(msgspec.Struct, frozen=True):
    """Why a request is rejected."""

    status: HTTPStatus
    code: str
    message: str


def _plain(scope: Scope, refusal: GuardRefusal) -> AsgiApp:
    body = msgspec.json.encode({"code": refusal.code, "message": refusal.message})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": refusal.status}
        await send({**start, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    return answer


def _nothing(scope: Scope) -> bool:
    return False


class RequestGuard:
    """ASGI middleware: rejects writes that come from a page of another site or under an unknown host name."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        hosts: Iterable[str] = (),
        private: Sequence[str] = (),
        origins: Iterable[str] = (),
        within: Sequence[str] = ("",),
        consumes: Callable[[Scope], bool] = _nothing,
        refused: Callable[[Scope, GuardRefusal], AsgiApp] = _plain,
    ) -> None:
        """``hosts``: names of the service in addition to addresses and ``localhost``. ``private``: path prefixes for
        which ``Host`` is checked on reads as well. ``origins``: pages of these origins may write. ``within``: path
        prefixes that are protected at all. ``consumes``: whether a read takes something away, and so is a write.
        ``refused``: makes the answer.
        """
        self.app = app
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._private = tuple(private)
        self._origins = frozenset(origin.lower() for origin in origins)
        self._within = tuple(within)
        self._consumes = consumes
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" and _is_below(scope, self._within) else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        _log.warning("http_request_refused", code=refusal.code, method=scope["method"])
        await self._refused(scope, refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> GuardRefusal | None:
        writes = scope["method"] not in _READS or self._consumes(scope)
        if not writes and not _is_below(scope, self._private):
            return None
        given: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        host = given.get("host", [])
        if len(host) != 1 or not self._known(host[0]):
            why = "Host is neither an address nor a known name of this service; http.hosts adds names"
            return GuardRefusal(HTTPStatus.MISDIRECTED_REQUEST, "host_refused", why)
        if any(origin.lower() in self._origins for origin in given.get("origin", [])):
            return None
        if writes and any(site not in {"same-origin", "none"} for site in given.get("sec-fetch-site", [])):
            return GuardRefusal(HTTPStatus.FORBIDDEN, "cross_site", "the request comes from a page of another site")
        if writes and any(not _same(origin, host[0]) for origin in given.get("origin", [])):
            return GuardRefusal(HTTPStatus.FORBIDDEN, "cross_site", "Origin differs from the service's own")
        return None

    def _known(self, host: str) -> bool:
        """Whether the host is safe: an address, or a name that no third party can point here."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        name = name.rstrip(".")
        if name.endswith(".localhost") or name in self._hosts or _is_address(name):
            return True
        return bool(name) and "." not in name  # of the local network, a container's say: nobody can register one


def _is_below(scope: Scope, prefixes: Sequence[str]) -> bool:
    path: str = scope["path"]
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    scheme, _, place = origin.partition("://")
    return scheme in {"http", "https"} and place.lower() == host.lower()

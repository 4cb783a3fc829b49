"""HTTP routes of the blob store, as plain ASGI.

``PUT`` or ``POST /blobs``   store the body under the address of its content: 201 and a BlobRef as JSON
``PUT /blobs/{id}``          the same, if the content has this address
``GET``, ``HEAD /blobs/{id}``  the content, with its media type, length and ETag; with ``Range`` a part, which is not
                             verified. Reading it whole takes a lease
``POST /blobs/{id}/lease``   extend its life by the maximum duration of a run, or by ``?seconds=``, at most twice
                             `retention.session_s`: 204
``POST /blobs/{id}/check``   verify the stored bytes against the address: 204, or 500 and `blob_corrupt`
``GET /blobs/{id}/link``     a URL of the backend, valid for ``?seconds=`` (up to an hour), as JSON, if it has such URLs

If the service has a token, every route requires ``Authorization: Bearer TOKEN``. Errors are a `BlobProblem` as JSON.
FastStream matches routes by exact path, so `WithBlobs` puts these routes in front of its app.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus import errors
from tokenbus.blob_wire import ARCHIVE_PATH, DEPLOYMENT_HEADER, PATH, BlobProblem
from tokenbus.blobs import DEFAULT_MEDIA_TYPE, BlobRef, parse_media_type
from tokenbus.bus.liveness import stop_task
from tokenbus.secret_env import Secret
from tokenbus_services.blobs.auth import admitted
from tokenbus_services.blobs.store import BlobStore, ByteRange, OutOfRange, part_of
from tokenbus_services.telemetry import NO_TRACER, RunTracer, Span

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_LINK_S = 3600
IDLE_S = 30.0
_BLOB_ID = re.compile(r"[A-Za-z0-9:_-]{1,100}")
_METHODS = {"": {"GET", "HEAD", "PUT", "DELETE"}, "lease": {"POST"}, "check": {"POST"}, "link": {"GET"}}
"""Allowed methods by the path segment after the id."""

# Blob content comes from models or strangers: browsers must neither guess its type nor run it.
UNTRUSTED: Headers = [(b"x-content-type-options", b"nosniff"), (b"content-security-policy", b"sandbox")]

_log = structlog.stdlib.get_logger()


class BlobLink(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that needs no token, valid for this many seconds."""

    url: str
    seconds: float


class ClientGone(Exception):
    """The client disconnected, so there is nothing to respond to."""


class WithBlobs:
    """An app with the routes of blobs, and those of an archive, in front of it. ``deployment``: id of the deployment,
    named in every answer.
    """

    def __init__(self, app: AsgiApp, blobs: AsgiApp, *, archive: AsgiApp | None = None, deployment: str = "") -> None:
        self.app = app
        self._in_front = {PATH: blobs} | ({ARCHIVE_PATH: archive} if archive else {})
        self._named: Headers = [(DEPLOYMENT_HEADER.encode(), deployment.encode())] if deployment else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = "/".join(scope.get("path", "").split("/")[:2])
        chosen = self._in_front.get(first, self.app) if scope["type"] == "http" else self.app

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._named]
            await send(message)

        await chosen(scope, receive, named if self._named else send)


class BlobRoutes:
    """The ASGI app for ``/blobs`` and everything below it."""

    def __init__(
        self,
        store: BlobStore,
        *,
        token: str | Secret = "",
        idle_s: float = IDLE_S,
        tracer: RunTracer = NO_TRACER,
        metrics: BlobMetrics | None = None,
    ) -> None:
        self._store = store
        self._token = token
        self._tracer = tracer
        self._metrics = metrics
        self._idle_s = idle_s
        """Maximum silence within an upload."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = dict[bytes, bytes](scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        trace = self._tracer.trace_of("blobs", parent)
        if trace is None:
            await self._answer(scope, receive, send)
            return
        began_ms, status = _now_ms(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, sent)
        finally:
            blob_id, _, what = scope["path"].removeprefix(PATH).removeprefix("/").partition("/")
            method = scope["method"]
            known = what if what in _METHODS else ""
            # This host's clock: the store has no connection to the server.
            self._tracer.record(
                trace,
                Span(
                    name=f"blob {known or method.lower()}",
                    span_id=trace.span(secrets.token_hex(8)),
                    parent_id=trace.publisher_span,
                    begin_ms=began_ms,
                    end_ms=_now_ms(),
                    kind="server",
                    attributes={
                        "http.request.method": method,
                        "http.response.status_code": status or None,
                        "tokenbus.blob.id": blob_id if _BLOB_ID.fullmatch(blob_id) else None,
                    },
                    error=str(status) if status >= 500 else None,
                ),
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._do(scope, receive, sent)
        except asyncio.CancelledError:  # the server stops, and waits for nothing but this answer
            if not begun:
                problem = BlobProblem(code="blob_unavailable", message="the blob service restarts: try again")
                await send_json(send, HTTPStatus.SERVICE_UNAVAILABLE, problem)

    async def _do(self, scope: Scope, receive: Receive, send: Send) -> None:
        method: str = scope["method"]
        blob_id: str = scope["path"].removeprefix(PATH).removeprefix("/")
        what = next((name for name in _METHODS if name and blob_id.endswith(f"/{name}")), "")
        allowed = _METHODS[what] if blob_id else {"PUT", "POST"}
        blob_id = blob_id.removesuffix(f"/{what}")
        try:
            if not admitted(dict[bytes, bytes](scope["headers"]).get(b"authorization", b""), self._token):
                raise errors.BlobUnauthorized(PATH)
            if method not in allowed:
                problem = BlobProblem(code="method_not_allowed", message=f"{method} is not allowed for this path")
                allow = (b"allow", ", ".join(sorted(allowed)).encode())
                await send_json(send, HTTPStatus.METHOD_NOT_ALLOWED, problem, [allow])
            elif what == "lease":
                await self._store.lease(blob_id, seconds=_seconds(scope))
                await send_empty(send, HTTPStatus.NO_CONTENT)
            elif what == "check":
                await self._store.verify(blob_id)
                await send_empty(send, HTTPStatus.NO_CONTENT)
            elif what == "link":
                await send_json(send, HTTPStatus.OK, await self._link(scope, blob_id))
            elif method == "DELETE":
                await self._store.delete(blob_id)
                await send_empty(send, HTTPStatus.NO_CONTENT)
            elif method in {"PUT", "POST"}:
                await send_json(send, HTTPStatus.CREATED, await self._put(scope, receive, blob_id or None))
            else:
                await self._get(scope, receive, send, blob_id)
        except ClientGone:
            _log.info("blob_upload_cut")
        except errors.BlobError as e:
            await answer_problem(send, e, self._metrics)

    async def _link(self, scope: Scope, blob_id: str) -> BlobLink:
        seconds = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"))).get("seconds", "300")
        if not (re.fullmatch(r"[0-9]{1,4}", seconds) and 1 <= int(seconds) <= MAX_LINK_S):
            raise errors.BlobRefused("seconds", f"must be 1 to {MAX_LINK_S}")
        return BlobLink(url=await self._store.link(blob_id, seconds=int(seconds)), seconds=int(seconds))

    async def _put(self, scope: Scope, receive: Receive, blob_id: str | None) -> BlobRef:
        headers = dict[bytes, bytes](scope["headers"])
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise errors.BlobRefused(
                "Content-Encoding", "a blob's address is that of its plain content: send it unencoded"
            )
        declared = headers.get(b"content-length")
        length = int(declared) if declared is not None and declared.isdigit() else None
        if length is not None and length > self._store.max_bytes:
            raise errors.BlobTooLarge(length, self._store.max_bytes)
        media_type = parse_media_type(headers.get(b"content-type", DEFAULT_MEDIA_TYPE.encode()).decode("latin-1"))
        return await self._store.put(body_of(receive, length, idle_s=self._idle_s), media_type, expected=blob_id)

    async def _get(self, scope: Scope, receive: Receive, send: Send, blob_id: str) -> None:
        ref = await self._store.head(blob_id)
        etag = f'"{ref.blob_id}"'.encode()
        headers: Headers = [(b"etag", etag), (b"accept-ranges", b"bytes"), *UNTRUSTED]
        if _matches(scope, etag):
            await send_empty(send, HTTPStatus.NOT_MODIFIED, headers)
            return
        try:
            part = _part(scope, etag, ref.size)
        except OutOfRange:
            headers.append((b"content-range", f"bytes */{ref.size}".encode()))
            await send_empty(send, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers)
            return
        headers.append((b"content-type", ref.media_type.encode()))
        status, size = HTTPStatus.OK, ref.size
        if part:
            status, size = HTTPStatus.PARTIAL_CONTENT, part.end - part.start
            headers.append((b"content-range", f"bytes {part.start}-{part.end - 1}/{ref.size}".encode()))
        headers.append((b"content-length", str(size).encode()))
        if scope["method"] == "GET":
            if not part:
                await self._store.lease(blob_id)
            blob = await self._store.open(blob_id, part)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            gone = asyncio.create_task(until_gone(receive), name="disconnect of a reader")
            try:
                async for chunk in blob.chunks():
                    if gone.done():  # what is sent now goes nowhere, and waits for nobody
                        return
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except errors.BlobError as e:
                # The head was already sent. An unfinished body makes the server close the connection, so that the
                # client sees a truncated body rather than wrong bytes as a complete blob.
                _log.error("blob_read_failed", blob_id=blob_id, code=e.code, problem=str(e))
                return
            finally:
                await stop_task(gone)
        else:
            await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body"})


async def answer_problem(send: Send, e: errors.BlobError, metrics: BlobMetrics | None) -> None:
    """Answer with the error, and report a store that failed."""
    if isinstance(e, errors.BlobUnavailable):
        hint = {"hint": FULL[e.code]} if e.code in FULL else {}
        _log.warning("blob_store_failed", code=e.code, where=e.where, problem=e.problem, **hint)
        if metrics:
            metrics.failed(e)
    challenge: Headers = [(b"www-authenticate", b"Bearer")] if isinstance(e, errors.BlobUnauthorized) else []
    await send_json(send, _status(e), _problem(e), challenge)


async def body_of(receive: Receive, declared: int | None, *, idle_s: float = IDLE_S) -> AsyncIterator[bytes]:
    """Yield the request's body. Raises BlobRefused if it stalls or its length differs from the declared one."""
    size = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(idle_s):
                message = await receive()
        except TimeoutError:
            raise errors.BlobRefused("upload", f"cut off: no data for {idle_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if chunk:
            yield chunk
    if declared is not None and size != declared:
        raise errors.BlobRefused("upload", f"received {size} bytes, but Content-Length is {declared}")


def _seconds(scope: Scope) -> int | None:
    given = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"))).get("seconds")
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", given):
        raise errors.BlobRefused("seconds", "must be a whole number")
    return int(given)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _part(scope: Scope, etag: bytes, size: int) -> ByteRange | None:
    """The part that a GET requests. Raises OutOfRange. None for a HEAD, and if If-Range names other content (RFC 9110,
    13.1.5 and 14.2).
    """
    headers = dict[bytes, bytes](scope["headers"])
    if scope["method"] != "GET" or headers.get(b"if-range", etag) != etag:
        return None
    return part_of(headers.get(b"range", b"").decode("latin-1"), size)


def _matches(scope: Scope, etag: bytes) -> bool:
    """Whether If-None-Match contains this ETag (RFC 9110, 13.1.2)."""
    given = b",".join(value for name, value in scope["headers"] if name == b"if-none-match")
    return any(tag.strip().removeprefix(b"W/") in {etag, b"*"} for tag in given.split(b","))


def _status(e: errors.BlobError) -> HTTPStatus:
    match e:
        case errors.BlobNotFound():
            return HTTPStatus.NOT_FOUND
        case errors.BlobTooLarge():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case errors.BlobRefused(where="media type" | "Content-Encoding"):
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        case errors.BlobRefused():
            return HTTPStatus.BAD_REQUEST
        case errors.BlobUnauthorized():
            return HTTPStatus.UNAUTHORIZED
        case errors.BlobStoreFull():
            return HTTPStatus.INSUFFICIENT_STORAGE
        case errors.BlobUnavailable():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def _problem(e: errors.TokenbusError) -> BlobProblem:
    if isinstance(e, errors.BlobTooLarge):
        return BlobProblem(code=e.code, message=str(e), size=e.size, limit=e.limit)
    # The client names the blob.
    return BlobProblem(code=e.code, message=getattr(e, "problem", None) or str(e))


async def send_empty(send: Send, status: HTTPStatus, headers: Headers | None = None) -> None:
    await send({"type": "http.response.start", "status": int(status), "headers": headers or []})
    await send({"type": "http.response.body"})


async def send_json(send: Send, status: HTTPStatus, body: msgspec.Struct, headers: Headers | None = None) -> None:
    content = msgspec.json.encode(body)
    head: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": int(status), "headers": head})
    await send({"type": "http.response.body", "body": content})


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class BlobMetrics:
    """Counts the requests that the store failed, by the code of the error, and remembers the last one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "tokenbus_blob_failures", "Requests that the blob store failed.", ["code"], registry=registry
        )
        self._last: tuple[str, float] | None = None
        for kind in (errors.BlobUnavailable, errors.BlobStoreFull, errors.BlobQuotaExceeded):
            self._failures.labels(kind.code)  # at 0 from the start: a rate sees the first failure too

    def failed(self, error: errors.BlobUnavailable) -> None:
        """Count a failure."""
        self._failures.labels(error.code).inc()
        self._last = error.code, time.monotonic()

    def health(self) -> dict[str, Any]:
        """The last failure, for `/health`; nothing if there was none."""
        if self._last is None:
            return {}
        code, at = self._last
        return {"last_failure": {"code": code, "ago_s": round(time.monotonic() - at)}}


# What to do about a blob store without room: said by its log and by `tokenbus doctor`.

FULL = {
    errors.BlobQuotaExceeded.code: "raise blobs.quota_bytes, or lower blobs.ttl_s so that blobs expire sooner",
    errors.BlobStoreFull.code: "make room where blobs are stored, or lower blobs.ttl_s so that blobs expire sooner",
}

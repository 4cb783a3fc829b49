"""One call to a provider that is no run: its answer's head, and the app that hands on its body as it comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
import structlog
from starlette.requests import ClientDisconnect

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import stop_task
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage
from tokenbus.providers.response.decoder import MAX_ERROR_BODY_BYTES
from tokenbus.providers.response.error_mapping import http_failure
from tokenbus_services.endpoints.endpoint import AuthUnavailable, Endpoint, KeyMissing, KeyUnusable
from tokenbus_services.endpoints.response_body import BodyRefused, beginning, described, read_body
from tokenbus_services.gateway.answers.asgi import Send, disconnected, head
from tokenbus_services.gateway.audit import AuditedRun
from tokenbus_services.gateway.http_request import Scope
from tokenbus_services.gateway.problem import Refusal, invalid, of_run
from tokenbus_services.net.http_client import HeadRefused
from tokenbus_services.redaction.events import RedactedEvents

HELD_BYTES = 16 * 2**10
"""Counts come at the end of an answer, or at its beginning. Only so much of each is held."""
_TRIED = 8
_KEYS = re.compile(rb'"(?:usage|usageMetadata)"\s*:\s*(?=\{)')
"""In a text of the answer the quotes would be escaped."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    """The fields of all the APIs."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    promptTokenCount: int | None = None  # noqa: N815
    completion_tokens: int | None = None
    output_tokens: int | None = None
    candidatesTokenCount: int | None = None  # noqa: N815
    total_tokens: int | None = None
    totalTokenCount: int | None = None  # noqa: N815
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class UsageScan:
    """Feed it every byte of an answer."""

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Add what came."""
        if len(self._head) < HELD_BYTES:
            self._head += data[: HELD_BYTES - len(self._head)]
        self._tail = (self._tail + data)[-HELD_BYTES:] if len(data) < HELD_BYTES else data[-HELD_BYTES:]

    @property
    def found(self) -> Usage | None:
        """The last counts of the answer; None if it has none of tokens."""
        for held in (self._tail, self._head):
            for match in reversed(list(_KEYS.finditer(held))[-_TRIED:]):
                if (usage := _usage(_object(held, match.end()))) is not None:
                    return usage
        return None


def _object(data: bytes, begin: int) -> bytes:
    """The object that begins there; it has no strings with braces."""
    depth = 0
    for at in range(begin, len(data)):
        depth += {0x7B: 1, 0x7D: -1}.get(data[at], 0)
        if not depth:
            return data[begin : at + 1]
    return b""


def _usage(data: bytes) -> Usage | None:
    try:
        counts = msgspec.json.decode(data, type=_Counts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    given = _first(counts.prompt_tokens, counts.input_tokens, counts.promptTokenCount)
    written = _first(counts.completion_tokens, counts.output_tokens, counts.candidatesTokenCount)
    total = _first(counts.total_tokens, counts.totalTokenCount)
    if given is None and total is not None:
        given = max(0, total - (written or 0))
    if given is None and written is None:
        return None
    details = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    numbers = (given or 0, written or 0, details.cached_tokens or 0)
    if min(numbers) < 0 or max(numbers) > 2**53:
        return None
    return Usage(input=numbers[0], output=numbers[1], cache_read=numbers[2] or None)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

UPLOAD_URL = "x-goog-upload-url"
"""Header of the answer to the beginning of an upload: where its content goes."""
SENT = frozenset({
    *("accept", "content-type", "anthropic-version", "anthropic-beta", "openai-beta"),
    *("x-goog-upload-protocol", "x-goog-upload-command", "x-goog-upload-offset", "x-goog-upload-file-name"),
    *("x-goog-upload-header-content-length", "x-goog-upload-header-content-type"),
})  # fmt: skip
"""Headers of the client that its provider gets. None that has a key, names an account or a client."""
RETURNED = ("content-type", "content-disposition", "x-goog-upload-status", "x-goog-upload-chunk-granularity")
"""Headers of the provider that its client gets."""
MAX_WHOLE_BYTES = 2**20
"""Maximum size of an answer that is read before it is handed on."""


class ProviderCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a provider."""

    endpoint: Endpoint
    method: str
    path: str
    """From the provider's root, or the whole URL of an upload."""
    headers: Mapping[str, str]
    query: Mapping[str, str]
    content: bytes | AsyncIterable[bytes] | None = None


class CallFailed(Refusal):
    """There is no answer, or it is an error."""

    def __init__(self, error: ErrorInfo, *, status: int | None = None, may_cost: bool = False) -> None:
        """``status``: of the provider. ``may_cost``: it may have done the work all the same."""
        super().__init__(of_run(error, None))
        self.status = status
        self.may_cost = may_cost


async def answer_to(call: ProviderCall) -> httpx.Response:
    """Make the call, once. Returns its answer, whose body is unread, if it is no error. Raises Refusal.

    Raises what the call's content raises, too.
    """
    endpoint = call.endpoint
    try:
        request = endpoint.forwarded(
            call.method, call.path, headers=call.headers, query=call.query, content=call.content
        )
        response = await endpoint.send(request, authorised="://" in call.path)
    except (KeyMissing, KeyUnusable) as e:
        log.error("forward_key_missing", provider=endpoint.name, problem=str(e))
        message = f"the gateway has no key of the provider {endpoint.name}; its operator sets it there, too"
        raise CallFailed(ErrorInfo(code="key_missing", kind="auth", message=message)) from None
    except AuthUnavailable as e:
        raise CallFailed(ErrorInfo(code="auth_unavailable", kind="auth", message=str(e), retryable=True)) from None
    except httpx.TransportError as e:
        sent = not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout)
        raise CallFailed(_transport_error(endpoint, e), may_cost=sent) from None
    if response.status_code < HTTPStatus.MULTIPLE_CHOICES:
        return response
    try:
        raise await _error(endpoint, response)
    finally:
        await response.aclose()


async def _error(endpoint: Endpoint, response: httpx.Response) -> CallFailed:
    status = response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        endpoint.rejected()  # the next call uses another key, if there is one
    try:
        content = await beginning(response, MAX_ERROR_BODY_BYTES)
    except (BodyRefused, httpx.TransportError):
        content = b""
    headers = {name: endpoint.redact(value) for name, value in response.headers.items()}
    error = http_failure(status, endpoint.redact.data(content), headers)
    if error.kind == "auth":
        error = msgspec.structs.replace(error, code="upstream_auth")
    elif error.kind == "unknown":  # a redirect, which is not followed
        error = msgspec.structs.replace(error, kind="protocol")
    return CallFailed(error, status=status)


def _transport_error(endpoint: Endpoint, error: httpx.TransportError) -> ErrorInfo:
    if isinstance(error, httpx.TimeoutException):
        code = "connect_timeout" if isinstance(error, httpx.ConnectTimeout) else "first_event_timeout"
        message = f"{endpoint.name} did not answer in time"
        return ErrorInfo(code=code, kind="timeout", message=message, retryable=True)
    if isinstance(error, HeadRefused):
        message = f"the head of the answer of {endpoint.name} has {error}"
        return ErrorInfo(code="answer_head", kind="protocol", message=message)
    message = endpoint.redact(f"the connection to {endpoint.name} failed: {described(error)}")
    return ErrorInfo(code="network", kind="network", message=message, retryable=True)


async def unless_gone(work: Awaitable[httpx.Response], receive: Any, was_read: asyncio.Event) -> httpx.Response:
    """Wait for the work as long as the client is there. ``was_read``: the body of its request was. Raises
    ClientDisconnect.
    """

    async def leaves() -> None:
        await was_read.wait()
        await disconnected(receive)

    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(leaves(), name="watcher of a client")
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except BaseException:
        working.cancel()
        (done,) = await asyncio.gather(working, return_exceptions=True)
        if isinstance(done, httpx.Response):
            await done.aclose()
        raise
    finally:
        await stop_task(gone)


async def whole_body(endpoint: Endpoint, response: httpx.Response) -> bytes:
    """Read an answer to its end. Raises Refusal."""
    try:
        content = bytearray()
        async with aclosing(read_body(response, limit=MAX_WHOLE_BYTES)) as pieces:
            async for piece in pieces:
                content += piece
    except BodyRefused as e:
        raise CallFailed(e.error, may_cost=True) from None
    except httpx.TransportError as e:
        raise CallFailed(_transport_error(endpoint, e), may_cost=True) from None
    finally:
        await response.aclose()
    return endpoint.redact.data(bytes(content))


Settle = Callable[[bool, Usage | None], object]
"""Called once with whether the answer was complete, and its token counts."""


class ForwardedAnswer:
    """An ASGI app: hands on the provider's answer as it comes, no faster than its client reads.

    An answer that breaks off is not ended either, so no client takes it for whole. If the client leaves, the call is
    cancelled.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        response: httpx.Response,
        *,
        headers: Mapping[str, str],
        use: AuditedRun,
        settle: Settle,
        most_bytes: int,
        send_timeout_s: float,
    ) -> None:
        self.use = use
        self._endpoint = endpoint
        self._response = response
        self._headers = headers
        self._settle = settle
        self._most_bytes = most_bytes
        self._send_timeout_s = send_timeout_s
        self._scan = UsageScan()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        writing = asyncio.create_task(self._write(send), name="writer of a forwarded answer")
        gone = asyncio.create_task(disconnected(receive), name="watcher of a client")
        complete = False
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            complete = writing.done() and writing.exception() is None
        finally:
            await stop_task(writing)
            await stop_task(gone)
            self.use.end = "completed" if complete else "cut"
            self.use.usage = self._scan.found
            self._settle(complete, self.use.usage)
            await self._response.aclose()
        if not complete and writing.done() and not writing.cancelled() and (error := writing.exception()):
            self._report(error)
            raise ConnectionResetError("the answer broke off")  # the server closes the connection

    def _report(self, error: BaseException) -> None:
        match error:
            case BodyRefused() | httpx.TransportError():
                why = self._endpoint.redact(described(error))
                log.info("forwarded_answer_cut", provider=self._endpoint.name, why=why)
            case TimeoutError() | OSError():  # the client reads nothing, or the provider dripped
                log.info("forwarded_answer_cut", provider=self._endpoint.name, why=type(error).__name__)
            case _:
                log.error("forwarded_answer_failed", provider=self._endpoint.name, exc_info=error)

    async def _write(self, send: Send) -> None:
        response = self._response
        await send(head(response.status_code, {**returned_headers(self._endpoint, response), **self._headers}))
        async with process_clock.timeout(self._endpoint.settings.call_timeout_s), aclosing(self._pieces()) as pieces:
            async for data in pieces:
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _pieces(self) -> AsyncGenerator[bytes]:
        redact = self._endpoint.redact
        events = self._response.headers.get("content-type", "").startswith("text/event-stream")
        redacted = RedactedEvents(redact) if events else redact.stream()
        async with aclosing(read_body(self._response, limit=self._most_bytes)) as pieces:
            async for piece in pieces:
                self._scan.feed(piece)
                if data := redacted.feed(piece):
                    yield data
        if data := redacted.end():
            yield data


def returned_headers(endpoint: Endpoint, response: httpx.Response) -> dict[str, str]:
    """The headers of an answer that its client gets."""
    kept = {name: endpoint.redact(response.headers[name]) for name in RETURNED if name in response.headers}
    safe = {name: value for name, value in kept.items() if value.isascii() and value.isprintable()}
    return {**safe, "x-content-type-options": "nosniff"}


def sent_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client that its provider gets. Raises Refusal."""
    sent = {name: value for name, value in headers.items() if name in SENT}
    for name, value in sent.items():
        if not value.isascii():
            raise invalid(name, "a header for the provider may have ASCII characters only")
    return sent

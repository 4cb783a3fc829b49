"""The mock provider: a local HTTP server that serves the provider APIs from scripts."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from functools import partial
from hashlib import blake2b
from http import HTTPMethod
from types import TracebackType
from typing import Any, Self, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocket
from uvicorn.server import ServerState

from tokenbus_services.mock_provider import calls
from tokenbus_services.mock_provider.apis import (
    anthropic,
    claude_clouds,
    gemini,
    gemini_interactions,
    openai_chat,
    openai_completions,
    openai_images,
    openai_responses,
)
from tokenbus_services.mock_provider.apis.provider_api import JobsApi, MockApi
from tokenbus_services.mock_provider.calls import OtherCall
from tokenbus_services.mock_provider.plan import (
    ResponsePlan,
    answer_of,
    delivered,
    event_ends,
    plan_rejection,
    plan_response,
    said,
    split_at,
)
from tokenbus_services.mock_provider.reply import STAMP, Reply
from tokenbus_services.mock_provider.request import MULTIPART, HttpError, ModelRequest, interpret, read_form
from tokenbus_services.mock_provider.request_log import AttemptCounter, Exchange, HttpRequest, RequestLog, State
from tokenbus_services.mock_provider.response_socket import ResponseSocket
from tokenbus_services.mock_provider.script import Fault, HangUp, Script, Status, Turn, Wire
from tokenbus_services.mock_provider.uploads import FileStore
from tokenbus_services.net.http_server import BoundedProtocol, HttpBounds, server_config
from tokenbus_services.net.request_guard import Receive, Scope, Send

_PATH = re.compile(r"/v1(?:beta)?/(?:responses|interactions)/(?P<id>[\w-]+)(?P<cancel>/cancel)?")
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class Job(msgspec.Struct, kw_only=True, eq=False):
    id: str
    request: ModelRequest
    turn: Turn
    api: JobsApi
    looks: int = 0
    """How often it was looked at as a whole."""
    resumed: list[int] = []
    """Where each further stream began: behind which event."""
    cancelled: bool = False


class JobStore:
    """The jobs that were started, oldest first."""

    def __init__(self) -> None:
        self.started: list[Job] = []

    def start(self, turn: Turn, request: ModelRequest, api: JobsApi) -> Job:
        request = msgspec.structs.replace(request, key=f"{len(self.started):04d}{request.key[4:]}")
        job = Job(id=api.id_of(request), request=request, turn=turn, api=api)
        self.started.append(job)
        return job

    def of(self, http_request: HttpRequest) -> Job | None:
        """The job that a request is about; None: it is about none. Raises HttpError."""
        path = _PATH.fullmatch(http_request.path)
        if path is None or path["id"] == "input_tokens":
            return None
        job = next((job for job in self.started if job.id == path["id"]), None)
        if job is None:
            raise HttpError(404, f"no job {path['id']!r}")
        return job

    def begin(self, job: Job, attempt: int) -> ResponsePlan:
        """The answer to the call that started it."""
        if not job.request.stream:
            return answer_of(job.api.without_output(job.request, "queued"))
        return delivered(answer_of_stream(job), job.turn, job.turn.fault_of(attempt), job.api, stream=True)

    def plan(self, job: Job, http_request: HttpRequest, attempt: int) -> ResponsePlan:
        """The answer to a later call about it."""
        if http_request.path.endswith("/cancel"):
            if http_request.method != HTTPMethod.POST:
                raise HttpError(405, "cancel takes POST")
            job.cancelled = True
            return answer_of(job.api.without_output(job.request, "cancelled"))
        if http_request.method != HTTPMethod.GET:
            raise HttpError(405, "a response takes GET")
        fault = job.turn.fault_of(attempt)
        if http_request.query.get("stream") == "true":
            if not job.request.stream:
                raise HttpError(400, "stream: the response was not started with it")
            if not job.api.resumes:
                raise HttpError(400, "the mock provider streams no interaction a second time")
            after = int(http_request.query.get("starting_after", "-1"))
            job.resumed.append(after)
            body = b"".join(event for event in _events(answer_of_stream(job)) if _number_of(event) > after)
            return delivered(body, job.turn, fault, job.api, stream=True)
        job.looks += 1
        if job.cancelled or job.looks <= job.turn.queued:
            status = "cancelled" if job.cancelled else "queued"
            return answer_of(job.api.without_output(job.request, status))
        whole = msgspec.structs.replace(job.request, stream=False)
        return delivered(said(job.turn.says, whole, job.api), job.turn, fault, job.api, stream=False)


def answer_of_stream(job: Job) -> bytes:
    return said(job.turn.says, msgspec.structs.replace(job.request, stream=True), job.api)


def _events(stream: bytes) -> list[bytes]:
    return split_at(stream, event_ends(stream))


def _number_of(event: bytes) -> int:
    found = _NUMBER.search(event)
    return int(found[1]) if found else -1


Choose = Callable[[ModelRequest], Script | Turn | None]
"""Chooses the script or turn for a request; None: the script named by its model."""

_MOCK_APIS: tuple[MockApi, ...] = (
    anthropic.mock_api,
    openai_chat.mock_api,
    openai_completions.mock_api,
    openai_responses.mock_api,
    openai_images.mock_api,
    gemini.mock_api,
    gemini_interactions.mock_api,
    claude_clouds.bedrock,
    claude_clouds.vertex,
)
_KEPT_BODY_BYTES = 256 * 2**20
_KEPT_ATTEMPTS = 100_000
_MAX_REQUEST_BYTES = 64 * 2**20
_STAMP = STAMP.encode()
_DAY_S = 24 * 3600
_BOUNDS = HttpBounds(connections=100_000, head_s=_DAY_S, body_window_s=_DAY_S, answer_s=_DAY_S)
"""A provider keeps idle connections, and waits for clients that do not read."""


class _Connection(BoundedProtocol):
    """A connection whose app also gets the transport, to cut it. ``changed`` is called when it has closed."""

    def __init__(self, *, changed: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._changed = changed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With a high-water mark of 0, a write waits until the kernel has taken the one before: reads are never merged.
        transport.set_write_buffer_limits(high=0)
        self.app = partial(cast(Any, self.app), transport=transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._changed()


class MockProvider:
    """Serves scripts to requests, inside an event loop::

        hello = Script(name="hello", turns=(Turn(says=Reply(text="Hello")),))
        async with MockProvider([hello]) as server:
            ...  # POST to server.url + "/v1/messages" with model "hello"

    A request gets what ``choose`` says, else the script named like its model; the turn follows from its history.
    An error of a script or of ``choose`` is answered with HTTP 500 and raised again when the block ends.
    """

    def __init__(
        self,
        scripts: Iterable[Script] = (),
        *,
        choose: Choose | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        keep: int = 1_000,
    ) -> None:
        self.files = FileStore()
        """What was uploaded to its file APIs."""
        self.jobs = JobStore()
        """The jobs in the background that were started."""
        self._scripts = {script.name: script for script in scripts}
        self._choose = choose
        self._address = (host, port)
        self._log = RequestLog(exchanges=keep, body_bytes=_KEPT_BODY_BYTES)
        self._attempts = AttemptCounter(_KEPT_ATTEMPTS)
        self._connections = ServerState()
        self._error: Exception | None = None
        self._listener: asyncio.Server | None = None

    def forget_tries(self) -> None:
        """Count the tries of each turn from the first again (`Turn.first`)."""
        self._attempts = AttemptCounter(_KEPT_ATTEMPTS)

    @property
    def url(self) -> str:
        """Base URL, without a path. Only while the server runs."""
        if self._listener is None:
            raise RuntimeError("the mock provider is not running")
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    @property
    def requests(self) -> Sequence[Exchange]:
        """The latest requests, at most ``keep``, oldest first."""
        return tuple(self._log.exchanges)

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections.connections)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever a request or connection changes."""
        await self._log.until(condition)

    async def requested(self, count: int = 1) -> Exchange:
        """Wait for the ``count``-th request since the start and return the latest."""
        await self.until(lambda: self._log.total >= count)
        return self._log.exchanges[-1]

    async def disconnected(self, exchange: Exchange) -> float:
        """Wait until the client leaves before the end of its response; return the time (`time.monotonic()`).

        Raises RuntimeError if the exchange ends in another way.
        """
        await self.until(lambda: exchange.ended)
        if exchange.state != "disconnected" or exchange.ended_at is None:
            raise RuntimeError(f"the exchange ended {exchange.state}")
        return exchange.ended_at

    def resume(self, exchange: Exchange) -> None:
        """Resume a stalled response."""
        exchange.resumed.set()

    async def __aenter__(self) -> Self:
        connection = partial(_Connection, changed=self._log.changed)
        config = server_config(self._serve, _BOUNDS, connection=connection, web_sockets=True, grace_s=0, kept_s=_DAY_S)
        config.load()
        accept = partial(config.http_protocol_class, config=config, server_state=self._connections, app_state={})  # pyright: ignore[reportCallIssue]
        self._listener = await asyncio.get_running_loop().create_server(accept, *self._address, backlog=1024)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in tuple(self._connections.connections):
            connection.transport.abort()
        await asyncio.gather(*self._connections.tasks)
        if self._error is not None and error is None:
            raise self._error

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, *, transport: asyncio.Transport | None = None
    ) -> None:
        """One request and its answer. Does not raise: the server would log it, and answer it by itself."""
        if transport is None:
            await self._serve_socket(WebSocket(scope, receive, send))
            return
        request, body = Request(scope, receive), bytearray()
        problem = (505, "HTTP/1.1 only") if scope["http_version"] != "1.1" else None
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > _MAX_REQUEST_BYTES:
                    problem = (413, f"more than {_MAX_REQUEST_BYTES} bytes")
                    break
        except ClientDisconnect:
            return
        if problem:
            status, text = problem
            await PlainTextResponse(text, status, headers={"connection": "close"})(scope, receive, send)
            return
        http_request = HttpRequest(
            method=request.method,
            path=scope["raw_path"].decode("ascii", "replace"),
            query=dict(request.query_params),
            headers=dict(request.headers),
            body=bytes(body),
        )
        await self._exchange(
            Exchange(http_request=http_request, received_at=time.monotonic()), receive, send, transport
        )

    async def _serve_socket(self, socket: WebSocket) -> None:
        """Responses over a WebSocket."""

        def begin(body: bytes) -> Exchange:
            path, headers = socket.scope["raw_path"].decode("ascii", "replace"), dict(socket.headers)
            http_request = HttpRequest(method="POST", path=path, query={}, headers=headers, body=body)
            exchange = Exchange(http_request=http_request, received_at=time.monotonic())
            self._log.add(exchange)
            return exchange

        steers = ResponseSocket(socket, begin, self._plan, self._set_state, refuses=self._refuses_steering)
        await steers.serve()

    def _refuses_steering(self, exchange: Exchange) -> bool:
        return exchange.request is not None and self._turn(exchange.request).refuses_steering

    async def _exchange(self, exchange: Exchange, receive: Receive, send: Send, transport: asyncio.Transport) -> None:
        self._log.add(exchange)
        leaving = asyncio.ensure_future(receive())  # all of the request is read: what comes next is the disconnect
        answering = asyncio.create_task(self._answer(exchange, self._plan(exchange), send, transport))
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        (failed,) = await asyncio.gather(answering, return_exceptions=True)
        if isinstance(failed, Exception) and not transport.is_closing():
            self._error = self._error or failed
            self._set_state("cut", exchange)
            transport.abort()
        await leaving  # the server logs an answer that is not complete while the connection is open
        if not exchange.ended:
            self._set_state("disconnected" if self._listener else "cut", exchange)

    async def _answer(
        self, exchange: Exchange, planned: ResponsePlan, send: Send, transport: asyncio.Transport
    ) -> None:
        await asyncio.sleep(planned.delay_s)
        if planned.status is not None:
            exchange.status = planned.status
            self._set_state("sending", exchange)
            # Without a length, the body is chunked: each read is one chunk.
            headers = {"date": formatdate(usegmt=True), **planned.headers}
            fields = [(name.lower().encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": planned.status, "headers": fields})
            await self._send_reads(exchange, planned.reads, planned.pace, send)
        if planned.ending == "stalled":
            self._set_state("stalled", exchange)
            await exchange.resumed.wait()
            self._set_state("sending", exchange)
            await self._send_reads(exchange, planned.rest, planned.pace, send)
        elif planned.ending != "complete":
            if planned.ending == "reset":
                taken: socket.socket = transport.get_extra_info("socket")
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._set_state("cut", exchange)
            transport.close()
            return
        await send({"type": "http.response.body"})
        self._set_state("sent", exchange)

    async def _send_reads(self, exchange: Exchange, reads: Sequence[bytes], pace: float | None, send: Send) -> None:
        """Send reads at ``pace`` a second, or as fast as they are taken. A late read does not delay later ones."""
        now = asyncio.get_running_loop().time
        start = now()
        for number, read in enumerate(reads):
            # Yields to the event loop at least once, so that no connection starves the others.
            await asyncio.sleep(max(0.0, start + number / pace - now()) if pace else 0)
            stamped = read.replace(_STAMP, b"%019d" % time.monotonic_ns()) if _STAMP in read else read
            await send({"type": "http.response.body", "body": stamped, "more_body": True})
            exchange.reads_sent += 1
            exchange.bytes_sent += len(read)
            self._log.changed()

    def _set_state(self, state: State, exchange: Exchange) -> None:
        exchange.state = state
        if exchange.ended:
            exchange.ended_at = time.monotonic()
        self._log.changed()

    def _plan(self, exchange: Exchange) -> ResponsePlan:
        mock_api, route = _route(exchange.http_request.path)
        try:
            if (uploading := self.files.plan(exchange.http_request)) is not None:
                return uploading
            if (call := calls.answer(exchange.http_request)) is not None:
                mock_api = call.mock_api
                return self._call(exchange, call)
            if job := self.jobs.of(exchange.http_request):
                exchange.request = job.request
                exchange.attempt = self._attempts.next(job.request.key)
                return self.jobs.plan(job, exchange.http_request, exchange.attempt)
            if route is None:
                raise HttpError(404, f"no such endpoint: {exchange.http_request.path}")
            exchange.request = request = _interpret(mock_api, route, exchange.http_request)
            self.files.check(request.api, request.headers, request.body)
            exchange.attempt = self._attempts.next(request.key)
            turn = self._turn(request)
            if request.body.get("background") and isinstance(mock_api, JobsApi):
                if isinstance(turn.fault_of(exchange.attempt), HangUp | Status):
                    return plan_response(turn, request, mock_api, exchange.attempt)
                job = self.jobs.start(turn, request, mock_api)
                return self.jobs.begin(job, self._attempts.next(job.request.key))
            return plan_response(turn, request, mock_api, exchange.attempt)
        except HttpError as rejected:
            return plan_rejection(mock_api, rejected)
        except Exception as e:
            self._error = self._error or e
            return plan_rejection(mock_api, HttpError(500, f"{type(e).__name__}: {e}"))

    def _call(self, exchange: Exchange, call: OtherCall) -> ResponsePlan:
        if call.model is None:
            return _answered(Turn(says=Reply()), call, None)
        key = blake2b(exchange.http_request.path.encode() + exchange.http_request.body).hexdigest()
        request = ModelRequest(
            api=call.mock_api.name,
            headers=exchange.http_request.headers,
            body={},
            model=call.model,
            stream=False,
            turn=0,
            user_text="",
            tool_results=(),
            key=key,
        )
        exchange.attempt = self._attempts.next(key)
        turn = self._turn(request)
        return _answered(turn, call, turn.fault_of(exchange.attempt))

    def _turn(self, request: ModelRequest) -> Turn:
        chosen = self._choose(request) if self._choose else None
        if isinstance(chosen, Turn):
            return chosen
        script = chosen or self._scripts.get(request.model)
        if script is None:
            raise HttpError(404, f"model: no script {request.model!r}; there are: {', '.join(sorted(self._scripts))}")
        if request.turn < len(script.turns):
            return script.turns[request.turn]
        if script.repeat_last:
            return script.turns[-1]
        raise HttpError(400, f"script {script.name!r} has {len(script.turns)} turns, and this is turn {request.turn}")


def _answered(turn: Turn, call: OtherCall, fault: Fault | None) -> ResponsePlan:
    body = turn.says.body if isinstance(turn.says, Wire) and turn.says.body is not None else call.body
    return delivered(body, turn, fault, call.mock_api, stream=False, content_type=call.content_type)


def _route(path: str) -> tuple[MockApi, re.Match[str] | None]:
    """The API of a path; for a path of none, one to write the error."""
    for mock_api in _MOCK_APIS:
        if route := mock_api.route.fullmatch(path):
            return mock_api, route
    return openai_chat.mock_api, None


def _interpret(mock_api: MockApi, route: re.Match[str], http_request: HttpRequest) -> ModelRequest:
    if http_request.method != "POST":
        raise HttpError(405, f"{http_request.path} takes POST, not {http_request.method}")
    body = _body(http_request)
    parsed = mock_api.parse(route, http_request.query, http_request.headers, body)
    return interpret(mock_api.name, parsed, http_request.headers, body)


def _body(http_request: HttpRequest) -> dict[str, Any]:
    """Raises Rejected."""
    content_type = http_request.headers.get("content-type", "")
    if content_type.startswith(MULTIPART):
        return read_form(content_type, http_request.body)
    try:
        return msgspec.json.decode(http_request.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise HttpError(400, f"the body is not a JSON object: {e}") from None

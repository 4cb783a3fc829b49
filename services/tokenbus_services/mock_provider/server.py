"""The mock provider: a local HTTP server that serves the provider APIs from scripts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from tokenbus_services.mock_provider.apis import (
    anthropic,
    gemini,
    openai_chat,
    openai_completions,
    openai_images,
    openai_responses,
)
from tokenbus_services.mock_provider.apis.provider_api import MockApi
from tokenbus_services.mock_provider.connection import AcceptedConnection, BadRequest
from tokenbus_services.mock_provider.multipart import MULTIPART, read_form
from tokenbus_services.mock_provider.plan import ResponsePlan, plan_rejection, plan_response
from tokenbus_services.mock_provider.request import HttpError, ModelRequest, interpret
from tokenbus_services.mock_provider.request_log import AttemptCounter, Exchange, HttpRequest, RequestLog, State
from tokenbus_services.mock_provider.script import Script, Turn
from tokenbus_services.mock_provider.uploads import FileStore

Choose = Callable[[ModelRequest], Script | Turn | None]
"""Chooses the script or turn for a request; None: the script named by its model."""

_MOCK_APIS: tuple[MockApi, ...] = (
    anthropic.mock_api,
    openai_chat.mock_api,
    openai_completions.mock_api,
    openai_responses.mock_api,
    openai_images.mock_api,
    gemini.mock_api,
)
_KEPT_BODY_BYTES = 256 * 2**20
_KEPT_ATTEMPTS = 100_000


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
        self._scripts = {script.name: script for script in scripts}
        self._choose = choose
        self._address = (host, port)
        self._log = RequestLog(exchanges=keep, body_bytes=_KEPT_BODY_BYTES)
        self._attempts = AttemptCounter(_KEPT_ATTEMPTS)
        self._serving: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self._listener: asyncio.Server | None = None

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
        return len(self._serving)

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
        host, port = self._address
        self._listener = await asyncio.start_server(self._connected, host, port, backlog=1024)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._error is not None and error is None:
            raise self._error

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(AcceptedConnection(reader, writer)))
        self._serving.add(task)
        task.add_done_callback(self._connection_closed)

    def _connection_closed(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._error = self._error or error
        self._log.changed()

    async def _serve(self, connection: AcceptedConnection) -> None:
        """One connection, from its first request to its close."""
        try:
            with suppress(OSError):  # a client may leave as it likes
                try:
                    while (http_request := await connection.receive()) and await self._exchange(
                        connection, http_request
                    ):
                        pass
                except BadRequest as e:
                    await connection.reject(e)
        finally:
            await connection.close()

    async def _exchange(self, connection: AcceptedConnection, http_request: HttpRequest) -> bool:
        """One request and its answer. False: the connection is of no further use."""
        exchange = Exchange(http_request=http_request, received_at=time.monotonic())
        self._log.add(exchange)
        answering = asyncio.create_task(self._answer(connection, exchange, self._plan(exchange)))
        leaving = asyncio.create_task(connection.wait_disconnected())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._set_state("cut", exchange)
            raise
        finally:
            answering.cancel()
            leaving.cancel()
            outcome, _ = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
            self._set_state("cut", exchange)
            raise outcome
        if not exchange.ended:
            self._set_state("disconnected", exchange)
        return outcome is True

    async def _answer(self, connection: AcceptedConnection, exchange: Exchange, planned: ResponsePlan) -> bool:
        """The answer to one request. True: another request may follow."""

        def sent(size: int) -> None:
            exchange.reads_sent += 1
            exchange.bytes_sent += size
            self._log.changed()

        await asyncio.sleep(planned.delay_s)
        if planned.status is not None:
            exchange.status = planned.status
            self._set_state("sending", exchange)
            await connection.send_head(planned.status, planned.headers)
            await connection.send_reads(planned.reads, planned.pace, sent)
        if planned.ending == "stalled":
            self._set_state("stalled", exchange)
            await exchange.resumed.wait()
            self._set_state("sending", exchange)
            await connection.send_reads(planned.rest, planned.pace, sent)
        elif planned.ending != "complete":
            if planned.ending == "reset":
                connection.reset()
            self._set_state("cut", exchange)
            return False
        more = await connection.send_end()
        self._set_state("sent", exchange)
        return more

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
            if route is None:
                raise HttpError(404, f"no such endpoint: {exchange.http_request.path}")
            exchange.request = request = _interpret(mock_api, route, exchange.http_request)
            self.files.check(request.api, request.headers, request.body)
            exchange.attempt = self._attempts.next(request.key)
            return plan_response(self._turn(request), request, mock_api, exchange.attempt)
        except HttpError as rejected:
            return plan_rejection(mock_api, rejected)
        except Exception as e:
            self._error = self._error or e
            return plan_rejection(mock_api, HttpError(500, f"{type(e).__name__}: {e}"))

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

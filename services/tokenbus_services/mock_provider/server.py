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

from tokenbus_services.mock_provider import (
    anthropic,
    gemini,
    openai_chat,
    openai_completions,
    openai_images,
    openai_responses,
)
from tokenbus_services.mock_provider.connection import BadRequest, Connection
from tokenbus_services.mock_provider.multipart import MULTIPART, read_form
from tokenbus_services.mock_provider.plan import Plan, plan, refusal
from tokenbus_services.mock_provider.provider_api import MockApi
from tokenbus_services.mock_provider.request import Asked, Refused, understand
from tokenbus_services.mock_provider.request_log import Attempts, Exchange, Journal, Received, State
from tokenbus_services.mock_provider.script import Script, Turn
from tokenbus_services.mock_provider.uploads import FileStore

Choose = Callable[[Asked], Script | Turn | None]
"""Chooses the script or turn for a request; None: the script named by its model."""

_DIALECTS: tuple[MockApi, ...] = (
    anthropic.dialect,
    openai_chat.dialect,
    openai_completions.dialect,
    openai_responses.dialect,
    openai_images.dialect,
    gemini.dialect,
)
_KEPT_BODY_BYTES = 256 * 2**20
_KEPT_ATTEMPTS = 100_000


class ReplayServer:
    """Serves scripts to requests, inside an event loop::

        hello = Script(name="hello", turns=(Turn(says=Reply(text="Hello")),))
        async with ReplayServer([hello]) as server:
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
        self._journal = Journal(exchanges=keep, body_bytes=_KEPT_BODY_BYTES)
        self._attempts = Attempts(_KEPT_ATTEMPTS)
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
        """The latest requests, ``keep`` at the most, oldest first."""
        return tuple(self._journal.exchanges)

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""
        return len(self._serving)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever a request or connection changes."""
        await self._journal.until(condition)

    async def requested(self, count: int = 1) -> Exchange:
        """Wait for the ``count``-th request since the start and return the latest."""
        await self.until(lambda: self._journal.total >= count)
        return self._journal.exchanges[-1]

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
        task = asyncio.create_task(self._serve(Connection(reader, writer)))
        self._serving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._error = self._error or error
        self._journal.changed()

    async def _serve(self, connection: Connection) -> None:
        """One connection, from its first request to its close."""
        try:
            with suppress(OSError):  # a client may leave as it likes
                try:
                    while (received := await connection.receive()) and await self._exchange(connection, received):
                        pass
                except BadRequest as e:
                    await connection.refuse(e)
        finally:
            await connection.close()

    async def _exchange(self, connection: Connection, received: Received) -> bool:
        """One request and its answer. False: the connection is of no further use."""
        exchange = Exchange(received=received, received_at=time.monotonic())
        self._journal.add(exchange)
        answering = asyncio.create_task(self._answer(connection, exchange, self._plan(exchange)))
        leaving = asyncio.create_task(connection.gone())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._enter("cut", exchange)
            raise
        finally:
            answering.cancel()
            leaving.cancel()
            outcome, _ = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
            self._enter("cut", exchange)
            raise outcome
        if not exchange.ended:
            self._enter("disconnected", exchange)
        return outcome is True

    async def _answer(self, connection: Connection, exchange: Exchange, planned: Plan) -> bool:
        """The answer to one request. True: another request may follow."""

        def sent(size: int) -> None:
            exchange.reads_sent += 1
            exchange.bytes_sent += size
            self._journal.changed()

        await asyncio.sleep(planned.delay_s)
        if planned.status is not None:
            exchange.status = planned.status
            self._enter("sending", exchange)
            await connection.send_head(planned.status, planned.headers)
            await connection.send_reads(planned.reads, planned.pace, sent)
        if planned.ending == "stalled":
            self._enter("stalled", exchange)
            await exchange.resumed.wait()
            self._enter("sending", exchange)
            await connection.send_reads(planned.rest, planned.pace, sent)
        elif planned.ending != "complete":
            if planned.ending == "reset":
                connection.reset()
            self._enter("cut", exchange)
            return False
        more = await connection.send_end()
        self._enter("sent", exchange)
        return more

    def _enter(self, state: State, exchange: Exchange) -> None:
        exchange.state = state
        if exchange.ended:
            exchange.ended_at = time.monotonic()
        self._journal.changed()

    def _plan(self, exchange: Exchange) -> Plan:
        if (uploading := self.files.plan(exchange.received)) is not None:
            return uploading
        dialect, route = _route(exchange.received.path)
        try:
            if route is None:
                raise Refused(404, f"no such endpoint: {exchange.received.path}")
            exchange.asked = asked = _understand(dialect, route, exchange.received)
            self.files.check(asked.api, asked.headers, asked.body)
            exchange.attempt = self._attempts.next(asked.key)
            return plan(self._turn(asked), asked, dialect, exchange.attempt)
        except Refused as refused:
            return refusal(dialect, refused)
        except Exception as e:
            self._error = self._error or e
            return refusal(dialect, Refused(500, f"{type(e).__name__}: {e}"))

    def _turn(self, asked: Asked) -> Turn:
        chosen = self._choose(asked) if self._choose else None
        if isinstance(chosen, Turn):
            return chosen
        script = chosen or self._scripts.get(asked.model)
        if script is None:
            raise Refused(404, f"model: no script {asked.model!r}; there are: {', '.join(sorted(self._scripts))}")
        if asked.turn < len(script.turns):
            return script.turns[asked.turn]
        if script.repeat_last:
            return script.turns[-1]
        raise Refused(400, f"script {script.name!r} has {len(script.turns)} turns, and this is turn {asked.turn}")


def _route(path: str) -> tuple[MockApi, re.Match[str] | None]:
    """The API of a path; for a path of none, one to write the error."""
    for dialect in _DIALECTS:
        if route := dialect.route.fullmatch(path):
            return dialect, route
    return openai_chat.dialect, None


def _understand(dialect: MockApi, route: re.Match[str], received: Received) -> Asked:
    if received.method != "POST":
        raise Refused(405, f"{received.path} takes POST, not {received.method}")
    body = _body(received)
    heard = dialect.hear(route, received.query, received.headers, body)
    return understand(dialect.name, heard, received.headers, body)


def _body(received: Received) -> dict[str, Any]:
    """Raises Refused."""
    content_type = received.headers.get("content-type", "")
    if content_type.startswith(MULTIPART):
        return read_form(content_type, received.body)
    try:
        return msgspec.json.decode(received.body, type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise Refused(400, f"the body is not a JSON object: {e}") from None

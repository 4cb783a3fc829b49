"""The answer to one request for a run: a stream in the surface's protocol, or a whole body.

A status can be sent only before the first byte. So a stream's head waits for the run's first event that decides the
status, and after a short time goes out as 200 anyway. Then silence is filled with the protocol's keep-alive bytes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
import structlog

from tokenbus.client.decode import is_end
from tokenbus.errors import TokenbusError
from tokenbus.events.public import (
    Cancelled,
    Incomplete,
    PublicEvent,
    Retrying,
    RunFailedEvent,
    Started,
    ToolProgress,
    UnknownEvent,
)
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.answers.asgi import Send
from tokenbus_services.gateway.answers.reader import Receive, RunReader
from tokenbus_services.gateway.audit import AuditedRun
from tokenbus_services.gateway.http_request import with_request
from tokenbus_services.gateway.problem import Problem, Refusal, defect, of_end, of_exception, restarting
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, WholeAnswer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_SAYS_LITTLE = (Started, Retrying, ToolProgress, UnknownEvent)
"""Events after which the run may still fail before anything was sent."""
_BAD_ENDS = (RunFailedEvent, Incomplete, Cancelled)
_LAST_WORDS_S = 1.0
SEND_BYTES = 256 * 1024
"""Maximum size of one write. The end of a large run may be many megabytes, and other answers continue in between."""


class AnswerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of a streamed answer, in seconds."""

    early_status_s: float = 2.0
    keep_alive_s: float = 5.0
    send_timeout_s: float = 30.0


class RunOfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    """Empty if it is not known yet."""
    events: AsyncGenerator[PublicEvent]
    refusal: Callable[[Problem], Answer]
    """Writes a problem before the first byte."""
    times: AnswerTimes
    headers: Mapping[str, str] = {}
    on_client_gone: Callable[[], None] | None = None
    """Called if the client disconnects before the run's end. None: the run continues without its client."""
    on_end: Callable[[], None] | None = None
    """Called in any case."""
    use: AuditedRun | None = None
    """The run's data for the audit line; None: only its id."""


class RunAnswer(ABC):
    """An ASGI app that answers one request with one run."""

    def __init__(self, how: RunOfAnswer) -> None:
        self.run = how.run
        self.use = how.use
        self._how = how
        self._headers = {**({"x-tokenbus-run": how.run} if how.run else {}), **how.headers}
        self._times = how.times
        self._head_sent = False
        self._scope: MutableMapping[str, Any] = {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._scope = scope
        reader = RunReader(self._how.events, receive)
        try:
            async with reader:
                try:
                    await self._answer(reader, send)
                except Refusal as e:
                    await self._fail(send, e.problem)
                except TokenbusError as e:
                    await self._fail(send, of_exception(e))
                except OSError:  # servers of newer ASGI versions report a disconnect in this way
                    reader.gone = True
        except asyncio.CancelledError:  # the server stops, and waits for nothing but this task
            if not (reader.ended or reader.gone):
                with suppress(TimeoutError, OSError):
                    async with asyncio.timeout(_LAST_WORDS_S):
                        await self._fail(send, restarting(self.run))
        except Exception:
            log.exception("answer_failed", run=self.run)
            await self._fail(send, defect(self.run))
        finally:
            if reader.gone and not reader.ended and self._how.on_client_gone:
                self._how.on_client_gone()
            if self._how.on_end:
                self._how.on_end()

    @abstractmethod
    async def _answer(self, reader: RunReader, send: Send) -> None:
        """Send the answer. Returns if the client has disconnected."""

    @abstractmethod
    async def _fail(self, send: Send, problem: Problem) -> None:
        """End the answer with this problem."""

    async def _refuse(self, send: Send, problem: Problem) -> None:
        self._head_sent = True
        answer = self._how.refusal(with_request(problem, self._scope))
        await asgi.send_answer(send, answer, {**self._headers, **asgi.headers_of(problem)})


class StreamedAnswer(RunAnswer):
    """A stream of the surface's events."""

    def __init__(
        self,
        how: RunOfAnswer,
        *,
        encoder: Callable[[PublicEvent], Encoder],
        media_type: str,
        keep_alive: bytes,
        early: bool = True,
    ) -> None:
        """``encoder``: makes the encoder, given the first event; may raise Refusal. ``early``: False sends the head at
        once.
        """
        super().__init__(how)
        self._make_encoder = encoder
        self._encoder: Encoder | None = None
        self._media_type = media_type
        self._keep_alive = keep_alive
        self._early = early

    async def _answer(self, reader: RunReader, send: Send) -> None:
        events = await self._first(reader) if self._early else []
        if reader.gone:
            return
        if problem := _refused(events):
            await self._refuse(send, problem)
            return
        first = self._encoded(events)
        await self._send_head(send)
        await self._send(send, first, last=reader.ended)
        while not reader.ended and not reader.gone:
            events = await reader.take(self._times.keep_alive_s)
            if events:
                await self._send(send, self._encoded(events), last=reader.ended)
            elif not reader.ended and not reader.gone:
                await self._send(send, [self._keep_alive])

    async def _first(self, reader: RunReader) -> list[PublicEvent]:
        """Wait for an event that decides the status."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._times.early_status_s
        events: list[PublicEvent] = []
        while not reader.ended and not reader.gone and (left := until - clock()) > 0:
            events += await reader.take(left)
            if any(not isinstance(event, _SAYS_LITTLE) for event in events):
                break
        return events

    def _encoded(self, events: list[PublicEvent]) -> list[bytes]:
        out: list[bytes] = []
        for event in events:
            if self._encoder is None:
                self._encoder = self._make_encoder(event)
                self._make_encoder = _made  # the request that it holds is needed no more
            out += self._encoder.feed(event)
            if isinstance(event, UnknownEvent) and is_end(event):
                out += self._encoder.broken(_unknown_end(self.run))
        return out

    async def _send_head(self, send: Send) -> None:
        self._head_sent = True
        await send(asgi.head(200, {**asgi.STREAM_HEADERS, "content-type": self._media_type, **self._headers}))

    async def _send(self, send: Send, pieces: Sequence[bytes], *, last: bool = False) -> None:
        bodies = _bodies(pieces) or ([b""] if last else [])
        for n, data in enumerate(bodies, 1):
            more = not last or n < len(bodies)
            async with asyncio.timeout(self._times.send_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
            if n < len(bodies):
                await asyncio.sleep(0)  # the other answers of this gateway

    async def _fail(self, send: Send, problem: Problem) -> None:
        if not self._head_sent:
            await self._refuse(send, problem)
            return
        # Without an encoder nothing was sent yet; the surface's own form of an error is known to its encoders alone.
        encoder = self._encoder or self._make_encoder(_nothing(self.run))
        await self._send(send, encoder.broken(with_request(problem, self._scope)), last=True)


class WholeRunAnswer(RunAnswer):
    """One body, after the run's end."""

    def __init__(self, how: RunOfAnswer, *, whole: Callable[[PublicEvent], WholeAnswer]) -> None:
        """``whole``: makes the collector, given the first event; may raise Refusal."""
        super().__init__(how)
        self._make_whole = whole

    async def _answer(self, reader: RunReader, send: Send) -> None:
        whole: WholeAnswer | None = None
        while not reader.ended and not reader.gone:
            for event in await reader.take(self._times.keep_alive_s):
                whole = whole or self._make_whole(event)
                if answer := whole.feed(event):
                    if isinstance(event, _BAD_ENDS) and answer.status >= HTTPStatus.BAD_REQUEST:
                        await self._refuse(send, of_end(event))
                        return
                    self._head_sent = True
                    extra = asgi.headers_of(of_end(event)) if isinstance(event, _BAD_ENDS) else {}
                    await asgi.send_answer(send, answer, {**self._headers, **extra})
                    return
        if not reader.gone:
            await self._fail(send, _unknown_end(self.run))

    async def _fail(self, send: Send, problem: Problem) -> None:
        if not self._head_sent:
            await self._refuse(send, problem)


def _made(event: PublicEvent) -> Encoder:
    raise AssertionError("the encoder is made once")


def _bodies(pieces: Sequence[bytes]) -> list[bytes]:
    """The same bytes in parts of at most `SEND_BYTES`; mostly a single one."""
    if sum(map(len, pieces)) <= SEND_BYTES:
        return [joined] if (joined := b"".join(pieces)) else []
    bodies: list[bytes] = []
    small: list[bytes] = []
    size = 0
    for piece in pieces:
        for at in range(0, len(piece), SEND_BYTES):
            part = piece if len(piece) <= SEND_BYTES else piece[at : at + SEND_BYTES]
            if small and size + len(part) > SEND_BYTES:
                bodies.append(b"".join(small))
                small, size = [], 0
            small.append(part)
            size += len(part)
    return [*bodies, b"".join(small)]


def _refused(events: list[PublicEvent]) -> Problem | None:
    """The problem of a run that ended before anything was sent."""
    if not events or any(not isinstance(event, _SAYS_LITTLE) for event in events[:-1]):
        return None
    match events[-1]:
        case RunFailedEvent() | Incomplete() | Cancelled() as end:
            return of_end(end)
        case _:
            return None


def _unknown_end(run: str) -> Problem:
    """A newer version ended the run in a way that no encoder here knows."""
    why = "the run ended in a way that this version of the gateway does not know"
    return Problem(status=502, code="unknown_end", message=why, kind="protocol", run=run)


def _nothing(run: str) -> PublicEvent:
    return UnknownEvent(run=run, seq=0, turn=0, attempt=0, event_type="none", fields={})

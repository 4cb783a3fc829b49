"""A run as a stream of the Gemini API: server-sent events, or one JSON array. Pure."""

from __future__ import annotations

from abc import abstractmethod

from tokenbus.events.public import BlockComplete, Cancelled, Chunk, Completed, Incomplete, PublicEvent, RunFailedEvent
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.contract import Encoder
from tokenbus_services.gateway.surfaces.gemini.answer import AnswerWriter, GeminiEcho, Json
from tokenbus_services.gateway.surfaces.gemini.errors import error_object
from tokenbus_services.gateway.surfaces.json_text import encode_line
from tokenbus_services.gateway.surfaces.settling import Settling


class GeminiStream(Encoder):
    """Thinking and calls are sent once no retry can void them; calls whole."""

    def __init__(self, run: str, model: str, echo: GeminiEcho) -> None:
        self._answer = AnswerWriter(run, model, echo)
        self._settling = Settling(hold_thinking=True, hold_calls=True, on_failure=echo.on_failure)

    def feed(self, event: PublicEvent) -> list[bytes]:
        return [data for settled in self._settling.feed(event) for data in self._encode(settled)]

    def broken(self, problem: Problem) -> list[bytes]:
        return [self._last(error_object(problem))]

    @abstractmethod
    def _more(self, chunk: Json) -> bytes:
        """A chunk that others follow."""

    @abstractmethod
    def _last(self, chunk: Json) -> bytes:
        """The last chunk."""

    def _encode(self, event: PublicEvent) -> list[bytes]:
        match event:
            case Chunk():
                part = self._answer.piece(event)
            case BlockComplete():
                part = self._answer.rest(event)
            case Completed():
                return [self._last(self._answer.response([{"text": ""}], event))]
            case Incomplete() | RunFailedEvent() | Cancelled():
                return self.broken(of_end(event))
            case _:
                part = None
        return [self._more(self._answer.response([part]))] if part else []


class EventStream(GeminiStream):
    """Server-sent events (`alt=sse`). Clients take no other lines than `data:`."""

    def _more(self, chunk: Json) -> bytes:
        return b"data: %b\n\n" % encode_line(chunk)

    def _last(self, chunk: Json) -> bytes:
        return self._more(chunk)


class ArrayStream(GeminiStream):
    """One JSON array, whose elements come one by one."""

    def __init__(self, run: str, model: str, echo: GeminiEcho) -> None:
        super().__init__(run, model, echo)
        self._before = b"["

    def _more(self, chunk: Json) -> bytes:
        before, self._before = self._before, b",\n"
        return before + encode_line(chunk)

    def _last(self, chunk: Json) -> bytes:
        return self._more(chunk) + b"]\n"

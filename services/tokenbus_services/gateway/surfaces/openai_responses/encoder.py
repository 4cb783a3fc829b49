"""The event stream of a response, and its whole answer."""

from __future__ import annotations

from typing import Any

from tokenbus.events.public import TERMINAL, Incomplete, PublicEvent, RunFailedEvent
from tokenbus_services.gateway.problem import Problem, of_run
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, GatewayNote, WholeAnswer
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.gateway.surfaces.json_text import encode_line
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseLog

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


class ResponseStream(Encoder):
    """Server-sent events, each with its name. ``after``: the `sequence_number` after which they are sent."""

    def __init__(self, note: GatewayNote, run: str, *, after: int = -1) -> None:
        self._log = ResponseLog(note, run, streamed=True)
        self._after = after

    def feed(self, event: PublicEvent) -> list[bytes]:
        data = self._framed(self._log.feed(event))
        return [*data, DONE] if isinstance(event, TERMINAL) else data

    def broken(self, problem: Problem) -> list[bytes]:
        events = self._log.broken(problem)
        for end in events[-1:]:  # it is sent wherever the client began, or the stream would end without a word
            end["sequence_number"] = max(end["sequence_number"], self._after + 1)
        return [*self._framed(events), DONE]

    def _framed(self, events: list[Json]) -> list[bytes]:
        return [
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_line(event))
            for event in events
            if event["sequence_number"] > self._after
        ]


class ResponseFrames(Encoder):
    """The same events, each as one JSON object: the frames of a WebSocket."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._log = ResponseLog(note, run, streamed=True)

    def feed(self, event: PublicEvent) -> list[bytes]:
        return [encode_line(each) for each in self._log.feed(event)]

    def broken(self, problem: Problem) -> list[bytes]:
        return [encode_line(each) for each in self._log.broken(problem)]


class WholeResponse(WholeAnswer):
    """The response after the run's end. A run that failed is an HTTP error."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._log = ResponseLog(note, run, streamed=False)
        self._run = run

    def feed(self, event: PublicEvent) -> Answer | None:
        self._log.feed(event)
        match event:
            case RunFailedEvent(error=error):
                return openai_refusal(of_run(error, self._run))
            case Incomplete(error=error) if error:
                return openai_refusal(of_run(error, self._run))
            case _ if isinstance(event, TERMINAL):
                return Answer(status=200, body=encode_line(self._log.response))
            case _:
                return None


class ResponseSoFar:
    """The response at any time, as `GET /v1/responses/{id}` has it: a failed run is not an HTTP error here."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._log = ResponseLog(note, run, streamed=False)

    def feed(self, event: PublicEvent) -> None:
        """Apply an event."""
        self._log.feed(event)

    def answer(self) -> Answer:
        """The response as it is now."""
        return Answer(status=200, body=encode_line(self._log.response))

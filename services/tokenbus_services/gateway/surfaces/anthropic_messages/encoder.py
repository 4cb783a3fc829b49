"""A run as a stream of the Messages API: https://docs.anthropic.com/en/docs/build-with-claude/streaming.

One run is one message, however many turns it has. Pure.
"""

from __future__ import annotations

from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    RunFailedEvent,
    Started,
)
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.answering import Echo
from tokenbus_services.gateway.surfaces.anthropic_messages.answer import (
    Json,
    ending,
    message_of,
    redacted_of,
    signature_of,
    usage_of,
)
from tokenbus_services.gateway.surfaces.anthropic_messages.errors import error_body
from tokenbus_services.gateway.surfaces.contract import Encoder
from tokenbus_services.gateway.surfaces.json_text import encode_line
from tokenbus_services.gateway.surfaces.settling import Settling


class MessagesStream(Encoder):
    """Thinking and calls are sent once no retry can void them."""

    def __init__(self, run: str, model: str, echo: Echo) -> None:
        self._run = run
        self._model = model
        self._echo = echo
        self._settling = Settling(hold_thinking=True, hold_calls=True, on_failure=echo.on_failure)
        self._open: dict[int, int] = {}
        """Place in the message's content of each open block of the run."""
        self._next = 0

    def feed(self, event: PublicEvent) -> list[bytes]:
        return [data for settled in self._settling.feed(event) for data in self._encode(settled)]

    def broken(self, problem: Problem) -> list[bytes]:
        return [b"event: error\ndata: %b\n\n" % error_body(problem)]

    def _encode(self, event: PublicEvent) -> list[bytes]:
        match event:
            case Started():
                usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
                return [_event("message_start", message=message_of(self._run, self._model, [], usage=usage))]
            case BlockStarted():
                return self._start(event)
            case Chunk():
                return self._delta(event)
            case BlockComplete():
                return self._stop(event)
            case Completed():
                ended = _event("message_delta", delta=ending(event, self._echo), usage=usage_of(event, self._echo))
                return [ended, _event("message_stop")]
            case Incomplete() | RunFailedEvent() | Cancelled():
                return self.broken(of_end(event))
            case _:
                return []

    def _start(self, event: BlockStarted) -> list[bytes]:
        match event.kind:
            case "text":
                return [self._begin(event.block, {"type": "text", "text": ""})]
            case "tool_call" if not self._echo.bus_tools:
                call: Json = {"type": "tool_use", "id": event.tool_id, "name": event.tool_name, "input": {}}
                return [self._begin(event.block, call)]
            case _:
                return []  # thinking begins with its first piece: a redacted block has none

    def _begin(self, block: int, content: Json) -> bytes:
        self._open[block] = self._next
        self._next += 1
        return _event("content_block_start", index=self._open[block], content_block=content)

    def _delta(self, event: Chunk) -> list[bytes]:
        match event:
            case Chunk(kind="text"):
                delta: Json = {"type": "text_delta", "text": event.text}
            case Chunk(kind="thinking"):
                begun = self._begin_thinking(event.block)
                return [*begun, self._changed(event.block, type="thinking_delta", thinking=event.text)]
            case Chunk(kind="tool_call", tool_call_part="input"):
                delta = {"type": "input_json_delta", "partial_json": event.text}
            case _:
                return []
        return [self._changed(event.block, **delta)] if event.block in self._open else []

    def _begin_thinking(self, block: int) -> list[bytes]:
        if block in self._open:
            return []
        return [self._begin(block, {"type": "thinking", "thinking": "", "signature": ""})]

    def _changed(self, block: int, **delta: object) -> bytes:
        return _event("content_block_delta", index=self._open[block], delta=delta)

    def _stop(self, event: BlockComplete) -> list[bytes]:
        out: list[bytes] = []
        if event.kind == "thinking":
            if event.block not in self._open and (data := redacted_of(event)):
                out.append(self._begin(event.block, {"type": "redacted_thinking", "data": data}))
            elif signature := signature_of(event):
                out += self._begin_thinking(event.block)
                out.append(self._changed(event.block, type="signature_delta", signature=signature))
        index = self._open.pop(event.block, None)
        return out if index is None else [*out, _event("content_block_stop", index=index)]


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_line({"type": kind, **fields}))

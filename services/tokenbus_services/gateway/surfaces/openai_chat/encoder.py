"""Chat Completions as a stream of chunks. Pure.

The rules are those of the official clients: the first delta has the role; a call's first delta alone has its id and
name; calls are numbered from 0 over the whole answer; one call per chunk; the usage chunk is the last before `[DONE]`.
"""

from __future__ import annotations

from tokenbus.events.public import (
    TERMINAL,
    BlockComplete,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    RunFailedEvent,
    TerminalEvent,
)
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote
from tokenbus_services.gateway.surfaces.json_text import encode_line
from tokenbus_services.gateway.surfaces.openai_chat.answer_fields import echo_of, finish_of, usage_object
from tokenbus_services.gateway.surfaces.openai_chat.errors import error_event
from tokenbus_services.gateway.surfaces.settling import Settling

DONE = b"data: [DONE]\n\n"


class ChatEncoder(Encoder):
    """Encodes one run. Thinking is sent at once, because it comes back unsigned and is harmless. Calls are sent once no
    retry can void them."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._echo = echo = echo_of(note)
        self._settling = Settling(hold_thinking=False, hold_calls=True, on_failure=echo.on_failure)
        same = {
            "id": f"chatcmpl-{run}",
            "object": "chat.completion.chunk",
            "created": note.created,
            "model": note.model,
        }
        self._same = encode_line(same)[:-1]
        self._role_sent = False
        self._calls: dict[int, int] = {}
        """Number of each call of the answer, by its block."""
        self._whole_calls = False
        """The client has a call that it can run."""
        self._text_of: int | None = None
        """The block whose text was sent last."""
        self._over = False

    def feed(self, event: PublicEvent) -> list[bytes]:
        if self._over:
            return []
        out: list[bytes] = []
        for settled in self._settling.feed(event):
            out += self._encode(settled)
        if isinstance(event, TERMINAL):
            self._over = True
        return out

    def broken(self, problem: Problem) -> list[bytes]:
        if self._over:
            return []
        self._over = True
        return [error_event(problem)]

    def _encode(self, event: PublicEvent) -> list[bytes]:
        match event:
            case Chunk(kind="text", visible=True, text=text) if text:
                return [*self._role(), *self._seam(event), self._text(text)]
            case Chunk(kind="thinking", text=text) if text and self._echo.reasoning:
                return [*self._role(), self._delta({"reasoning_content": text})]
            case Chunk(kind="tool_call", tool_call_part="input", text=text) if text and not self._echo.bus_tools:
                return self._arguments(event, text)
            case BlockComplete(kind="tool_call") if not self._echo.bus_tools and not event.cut:
                self._whole_calls = True
                # Clients parse the arguments as JSON.
                return [] if event.block in self._calls else self._arguments(event, "{}")
            case Completed() | Incomplete() | RunFailedEvent() | Cancelled():
                return self._end(event)
            case _:
                return []

    def _role(self) -> list[bytes]:
        if self._role_sent:
            return []
        self._role_sent = True
        return [self._delta({"role": "assistant", "content": ""})]

    def _seam(self, event: Chunk) -> list[bytes]:
        """Texts of two turns of one answer are apart by a blank line, as in the run's own `text`."""
        before, self._text_of = self._text_of, event.turn
        return [self._text("\n\n")] if before is not None and before != event.turn else []

    def _arguments(self, event: Chunk | BlockComplete, text: str) -> list[bytes]:
        begun: list[bytes] = []
        if event.block not in self._calls:
            begun = self._call(event)
        call = {"index": self._calls[event.block], "function": {"arguments": text}}
        return [*begun, self._delta({"tool_calls": [call]})]

    def _call(self, event: Chunk | BlockComplete) -> list[bytes]:
        # Do not announce a call before its first argument: if it is cut, the client could not run it.
        self._calls[event.block] = index = len(self._calls)
        function = {"name": event.tool_name or "", "arguments": ""}
        call = {"index": index, "id": event.tool_id or f"call_{event.block}", "type": "function", "function": function}
        return [*self._role(), self._delta({"tool_calls": [call]})]

    def _end(self, end: TerminalEvent) -> list[bytes]:
        if not isinstance(end, Completed):
            return [error_event(of_end(end))]
        finish = finish_of(end.finish, calls=self._whole_calls)
        out = [*self._role(), self._delta({}, finish)]
        if self._echo.usage:
            out.append(self._chunk(b'"choices":[],"usage":' + encode_line(usage_object(end.usage))))
        return [*out, DONE]

    def _text(self, text: str) -> bytes:
        return self._chunk(
            b'"choices":[{"index":0,"delta":{"content":' + encode_line(text) + b'},"finish_reason":null}]'
        )

    def _delta(self, delta: dict[str, object], finish: str | None = None) -> bytes:
        return self._chunk(b'"choices":' + encode_line([{"index": 0, "delta": delta, "finish_reason": finish}]))

    def _chunk(self, rest: bytes) -> bytes:
        return b"data: " + self._same + b"," + rest + b"}\n\n"

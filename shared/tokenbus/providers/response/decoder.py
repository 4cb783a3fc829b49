"""What all response decoders share: framing, the one terminal event, bounds, and errors by HTTP status.

A provider's decoder says what one event means (`_read`) and what the end of the body means (`_closed`).
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import (
    Cut,
    Done,
    Failed,
    FinishReason,
    Image,
    Normalized,
    Start,
    Terminal,
    ToolCallStart,
)
from tokenbus.providers.response.error_mapping import http_failure, provider_failure, wire_failure
from tokenbus.providers.response.inline_thinking import InlineThinking
from tokenbus.providers.response.json_decode import is_unfinished, read
from tokenbus.providers.response.sse import MAX_EVENT_BYTES, MAX_IDLE_LINES, SseDecoder, SseEvent
from tokenbus.providers.response.surrogates import Halves, stand_ins

_DONE = b"[DONE]"
_anything = msgspec.json.Decoder()

MAX_ERROR_BODY_BYTES = 64 * 2**10
"""Of an error's body so much is kept; the rest is dropped."""
MAX_OPEN_BLOCKS = 1024
"""Most blocks that an attempt may have open at once."""
MAX_NAME_CHARS = 1_024
"""Of a name, an id or a word of the provider's: what a request may have of each, with which they go back."""
MAX_HELD_BYTES = MAX_EVENT_BYTES
"""Most that a decoder keeps of content which it can only tell later (a server tool's input, citations)."""


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """Of a struct that leaves methods to those below it."""


class ResponseDecoder(msgspec.Struct, metaclass=_AbstractStruct, kw_only=True):
    """One response's bytes in, normalised events out; see `tokenbus.providers.api.Decoder`.

    A response that is one JSON body goes the same way: to the framing it is a single event.
    """

    status: int
    headers: dict[str, str]
    sse: SseDecoder = msgspec.field(default_factory=SseDecoder)
    ended: bool = False
    """The terminal event is out, or the body has ended."""
    error_body: bytearray = msgspec.field(default_factory=bytearray)
    held: int = 0
    """Bytes of content kept for later."""
    halves: Halves | None = None
    """Joins halves of a character, once there was one."""
    inline: InlineThinking | None = None
    """Takes thinking out of the text, where a vendor leaves it there."""

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str], **more: Any) -> Self:
        """A fresh decoder of a response with this HTTP status and these headers; ``more``: fields of its own."""
        kept = {name.lower(): value for name, value in headers.items()}
        return cls(status=status, headers=kept, **more)

    def feed(self, data: bytes) -> list[Normalized]:
        """The events that these bytes complete. Never raises."""
        out: list[Normalized] = []
        if self._is_error:
            self.error_body += data[: MAX_ERROR_BODY_BYTES - len(self.error_body)]
        else:
            self._take(self.sse.feed(data), out, at_end=False)
        return self._given(out)

    def end(self) -> list[Normalized]:
        """The body ended: the last events, and the terminal one if it has not come before. Never raises."""
        out: list[Normalized] = []
        if self._is_error:
            if not self.ended:
                self._close(Failed(self._http_failure()), out)
            return out
        self._take(self.sse.end(), out, at_end=True)
        if not self.ended:
            try:
                terminal = self._closed(out)
            except Malformed as e:
                terminal = Failed(wire_failure(e))
            self._close(terminal, out)
        return self._given(out)

    def _given(self, out: list[Normalized]) -> list[Normalized]:
        """The events as their reader gets them."""
        if self.halves is not None:
            out = self.halves.join(out)
        return out if self.inline is None else self.inline.split(out)

    @abstractmethod
    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        """One event of the provider: what it means goes to ``out``; the terminal event is returned.

        Raises Malformed and TooLarge: the attempt ends with them.
        """

    @abstractmethod
    def _closed(self, out: list[Normalized]) -> Terminal:
        """The body ended and no terminal event came: what that means. Raises Malformed."""

    def _hold(self, size: int) -> None:
        """So many bytes more are kept for later; less than 0: fewer. Raises TooLarge where they are too many."""
        self.held += size
        if self.held > MAX_HELD_BYTES:
            raise TooLarge("content held back", self.held, MAX_HELD_BYTES)

    def _take(self, events: list[SseEvent], out: list[Normalized], *, at_end: bool) -> None:
        for event in events:
            if self.ended:
                return
            if at_end and event.data != _DONE and _DONE.startswith(event.data):
                continue  # [DONE], broken off
            before = len(out)
            try:
                if not event.data.isascii():
                    _check_text(event.data)
                terminal = (
                    self._read(self._joinable(event), out) if event.name != b"error" else Failed(_error_of(event.data))
                )
                if long := _too_long(out[before:], terminal):
                    del out[before:]
                    raise long
            except (Malformed, TooLarge) as e:
                terminal = Failed(wire_failure(e, event.data))
                if at_end and is_unfinished(event.data):
                    terminal = Cut("the body ended inside of an event")
            except RecursionError:
                terminal = Failed(wire_failure(Malformed("event", "it is nested too deep"), event.data))
            if terminal is not None:
                self._close(terminal, out)
        if self.sse.oversize and not self.ended:
            # The true size is not known, for the rest was not waited for.
            error = TooLarge("server-sent event", self.sse.limit + 1, self.sse.limit)
            if self.sse.idle > MAX_IDLE_LINES:
                error = TooLarge("lines that say nothing", self.sse.idle, MAX_IDLE_LINES, unit="lines")
            self._close(Failed(wire_failure(error)), out)

    def _joinable(self, event: SseEvent) -> SseEvent:
        """The event with halves of a character in a form that can be read."""
        data, halved = stand_ins(event.data)
        if halved and self.halves is None:
            self.halves = Halves()
        return event if data is event.data else SseEvent(data, event.name)

    def _close(self, terminal: Terminal, out: list[Normalized]) -> None:
        self.ended = True
        out.append(terminal)

    @property
    def _is_error(self) -> bool:
        """The body is no answer: an error, or a redirect that nobody follows."""
        return self.status >= 300

    def _http_failure(self) -> ErrorInfo:
        framing = SseDecoder()
        body = bytes(self.error_body)
        events = framing.feed(body) + framing.end()
        return http_failure(self.status, events[0].data if events else body, self.headers)


def _too_long(events: list[Normalized], terminal: Terminal | None) -> TooLarge | None:
    """The first name, id or word that is too long: it would be copied into keys, hashes and each event of its block."""
    for event in (*events, terminal):
        match event:
            case ToolCallStart():
                said = {"tool call id": event.tool_id, "tool name": event.name}
            case Start():
                said = {"model": event.model, "response id": event.provider_id}
            case Done():
                said = {"finish reason": event.finish_raw, "stop string": event.stop_string}
            case Image():
                said = {"media type": event.media_type, "size": event.size, "quality": event.quality}
            case _:
                continue
        for what, text in said.items():
            if len(text) > MAX_NAME_CHARS:
                return TooLarge(what, len(text), MAX_NAME_CHARS, unit="characters")
    return None


def _check_text(data: bytes) -> None:
    """Raises Malformed where it is no UTF-8; all that is read of an event later may rely on it."""
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise Malformed("event", f"it is no UTF-8: {e.reason} at byte {e.start}") from None


def _error_of(data: bytes) -> ErrorInfo:
    """What an event of the name ``error`` says: the error is in it, as JSON or as text. Raises Malformed."""
    try:
        return provider_failure(read(_anything, data, "error event"))
    except Malformed:
        if is_unfinished(data):
            raise
        return provider_failure(data.decode())


def finish_of(said: FinishReason, completed_calls: int) -> FinishReason:
    """The finish reason in the light of the calls (providers.md, "For all four", 5).

    A provider that says stop beside complete calls means tool use; one that says tool use without any is not
    believed. So `tool_use` always has a call to run.
    """
    if said == "stop" and completed_calls:
        return "tool_use"
    if said == "tool_use" and not completed_calls:
        return "unknown"
    return said

"""Base class of all response decoders: framing, exactly one terminal event, size limits, HTTP errors.

A subclass defines what one event means (`_read`) and what the end of the body means (`_closed`).
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self
from zlib import crc32

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.providers.response.end_of_stream import cut_inside_event, is_cut_done, is_unfinished
from tokenbus.providers.response.error_mapping import http_failure, provider_failure, wire_failure
from tokenbus.providers.response.inline_thinking import InlineThinking
from tokenbus.providers.response.json_decode import read
from tokenbus.providers.response.sse import (
    MAX_COMMENT_BYTES,
    MAX_EVENT_BYTES,
    MAX_IDLE_LINES,
    SseDecoder,
    SseEvent,
)
from tokenbus.providers.response.surrogates import SurrogateJoiner, with_placeholders

_anything = msgspec.json.Decoder()

MAX_ERROR_BODY_BYTES = 64 * 2**10
"""Maximum bytes of an error body to keep; the rest is dropped."""
MAX_OPEN_BLOCKS = 1024
"""Maximum number of blocks that may be open at once in an attempt."""
MAX_NAME_CHARS = 1_024
"""Maximum length of a name, id or keyword from the provider. Requests have the same limit, because these values are
sent back.
"""
MAX_HELD_BYTES = MAX_EVENT_BYTES
"""Maximum content that a decoder may buffer because it can be emitted only later (a server tool's input, citations)."""

MAX_EVENTS = 16_384
"""Maximum normalized events that one event of the provider may become: 5,000 short blocks. All of them are decoded at
once, so more would hold up every other run of the worker.
"""


class _Events(list[n.Normalized]):
    """What `ResponseDecoder._read` appends to, up to a limit."""

    def append(self, event: n.Normalized, /) -> None:
        """Raises TooLarge over the limit, so that the rest of the provider's event is not decoded."""
        super().append(event)
        check_pieces(len(self))


def check_pieces(number: int) -> None:
    """Raise TooLarge if an event of the provider has, or has become, more pieces than `MAX_EVENTS`."""
    if number > MAX_EVENTS:
        raise _too_many(number)


def _too_many(number: int) -> TooLarge:
    return TooLarge("server-sent event", number, MAX_EVENTS, unit="pieces")


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """Metaclass for structs with abstract methods."""


class ResponseDecoder(msgspec.Struct, metaclass=_AbstractStruct, kw_only=True):
    """Turns one response's bytes into normalized events; see `tokenbus.providers.api.Decoder`.

    A response that is a single JSON body takes the same path: the framing reports it as one event.
    """

    status: int
    headers: dict[str, str]
    sse: SseDecoder = msgspec.field(default_factory=SseDecoder)
    started: bool = False
    """`Start` was emitted."""
    ended: bool = False
    """The terminal event was emitted, or the body has ended."""
    error_body: bytearray = msgspec.field(default_factory=bytearray)
    held: int = 0
    """Bytes of buffered content."""
    halves: SurrogateJoiner | None = None
    """Joins split surrogate pairs; created when the first half appears."""
    about: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Data about the whole answer, by name: the latest JSON. Emitted before the terminal event."""
    latest: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Fingerprint of the latest value of data beside the content, by name. Many vendors repeat it in each event."""
    inline: InlineThinking | None = None
    """Extracts thinking from the text, for vendors that leave it there."""
    next_ordinal: int = 0
    """Of the block that begins next."""

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str], **more: Any) -> Self:
        """Create a decoder for a response with this HTTP status and these headers. ``more``: fields of the subclass."""
        kept = {name.lower(): value for name, value in headers.items()}
        return cls(status=status, headers=kept, **more)

    def feed(self, data: bytes) -> list[n.Normalized]:
        """Return the events that these bytes complete. Never raises."""
        out: list[n.Normalized] = []
        if self._is_error:
            self.error_body += data[: MAX_ERROR_BODY_BYTES - len(self.error_body)]
        else:
            self._process(self.sse.feed(data), out, at_end=False)
        return self._postprocess(out)

    def end(self) -> list[n.Normalized]:
        """Handle the end of the body: return the last events, including the terminal one if it is still missing. Never
        raises.
        """
        out: list[n.Normalized] = []
        if self._is_error:
            if not self.ended:
                self._close(n.Failed(self._http_failure()), out)
            return out
        self._process(self.sse.end(), out, at_end=True)
        if not self.ended:
            try:
                terminal = self._closed(out)
            except Malformed as e:
                terminal = n.Failed(wire_failure(e))
            self._close(terminal, out)
        return self._postprocess(out)

    def _postprocess(self, out: list[n.Normalized]) -> list[n.Normalized]:
        """Postprocess events: join surrogate pairs, extract inline thinking."""
        if self.halves is not None:
            out = self.halves.join(out)
        return out if self.inline is None else self.inline.split(out)

    @abstractmethod
    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        """Decode one provider event: append normalized events to ``out`` and return the terminal event, if any.

        May raise Malformed or TooLarge, which ends the attempt.
        """

    def _failed(self, error: ErrorInfo) -> n.Terminal:
        """Return the terminal event for an error that the provider reports in the stream."""
        return n.Failed(error)

    @abstractmethod
    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        """Return the terminal event for a body that ended without one. May raise Malformed."""

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1

    def _hold(self, size: int) -> None:
        """Account for ``size`` more buffered bytes or characters (negative: fewer). Raises TooLarge over the limit."""
        self.held += size
        if self.held > MAX_HELD_BYTES:
            raise TooLarge("buffered content", self.held, MAX_HELD_BYTES, unit="bytes or characters")

    def _note(self, fields: Mapping[str, str]) -> None:
        """Keep data about the whole answer; a later value replaces an earlier one."""
        for name, json in fields.items():
            known = self.about.get(name)
            self._hold(len(json) + len(name) + 64 if known is None else len(json) - len(known))
            self.about[name] = json

    def _taken(self, names: Iterable[str]) -> dict[str, str]:
        """Remove and return what was kept of the whole answer under these names."""
        taken = {name: self.about.pop(name) for name in names if name in self.about}
        self._hold(-sum(len(name) + len(json) + 64 for name, json in taken.items()))
        return taken

    def _is_told(self, name: str, json: str) -> bool:
        """Whether `_beside` emitted this value last under this name."""
        return self.latest.get(name) == crc32(json.encode())

    def _beside(self, fields: Mapping[str, str], block: int | None, out: list[n.Normalized]) -> None:
        """Emit data of a block, or of the answer if it is None, unless it repeats the value before it."""
        for name, json in fields.items():
            if not self._is_told(name, json):
                self._hold(0 if name in self.latest else len(name) + 64)
                self.latest[name] = crc32(json.encode())
                out.append(n.Extra(name, json, block))

    def _process(self, events: list[SseEvent], out: list[n.Normalized], *, at_end: bool) -> None:
        for event in events:
            if self.ended:
                return
            if at_end and is_cut_done(event.data):
                continue
            found = _Events()
            try:
                if not event.data.isascii():
                    _check_text(event.data)
                terminal = (
                    self._read(self._with_placeholders(event), found)
                    if event.name != b"error"
                    else self._failed(_error_of(event.data))
                )
                if wrong := _too_long(found, terminal):
                    found.clear()
                    raise wrong
            except (Malformed, TooLarge) as e:
                cut = cut_inside_event(event.data) if at_end and isinstance(e, Malformed) else None
                terminal = cut or n.Failed(wire_failure(e, event.data))
            except RecursionError:
                terminal = n.Failed(wire_failure(Malformed("event", "nested too deeply"), event.data))
            if len(found) <= MAX_EVENTS:
                out += found
            if terminal is not None:
                self._close(terminal, out)
        if self.sse.oversize and not self.ended:
            # The true size is unknown: the decoder did not wait for the rest.
            error = TooLarge("server-sent event", self.sse.limit + 1, self.sse.limit)
            if self.sse.idle > MAX_IDLE_LINES:
                error = TooLarge("lines without content", self.sse.idle, MAX_IDLE_LINES, unit="lines")
            elif self.sse.comment_bytes > MAX_COMMENT_BYTES:
                error = TooLarge("comments of the stream", self.sse.comment_bytes, MAX_COMMENT_BYTES)
            self._close(n.Failed(wire_failure(error)), out)

    def _with_placeholders(self, event: SseEvent) -> SseEvent:
        """Replace lone surrogate escapes in the event with placeholders."""
        data, halved = with_placeholders(event.data)
        if halved and self.halves is None:
            self.halves = SurrogateJoiner()
        return event if data is event.data else SseEvent(data, event.name)

    def _close(self, terminal: n.Terminal, out: list[n.Normalized]) -> None:
        self.ended = True
        if self.started:
            out += [n.Extra(name, json) for name, json in self.about.items()]
        out.append(terminal)

    @property
    def _is_error(self) -> bool:
        """The body is not an answer: an error, or a redirect that is not followed."""
        return self.status >= 300

    def _http_failure(self) -> ErrorInfo:
        framing = SseDecoder()
        body = bytes(self.error_body)
        events = framing.feed(body) + framing.end()
        return http_failure(self.status, events[0].data if events else body, self.headers)


def _too_long(events: list[n.Normalized], terminal: n.Terminal | None) -> TooLarge | None:
    """Find that there are too many events, or the first name, id or keyword that is too long. These are copied into
    keys, hashes and every event of a block.
    """
    if len(events) > MAX_EVENTS:  # `_read` may add several at once
        return _too_many(len(events))
    for event in (*events, terminal):
        match event:
            case n.ToolCallStart():
                values = {"tool call id": event.tool_id, "tool name": event.name}
            case n.Start():
                values = {"model": event.model, "response id": event.provider_id}
            case n.Done():
                values = {"finish reason": event.finish_raw, "stop string": event.stop_string}
            case n.Image():
                values = {"media type": event.media_type, "size": event.size, "quality": event.quality}
            case _:
                continue
        for what, text in values.items():
            if len(text) > MAX_NAME_CHARS:
                return TooLarge(what, len(text), MAX_NAME_CHARS, unit="characters")
    return None


def _check_text(data: bytes) -> None:
    """Raise Malformed unless the data is UTF-8. Later reads of the event rely on this."""
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise Malformed("event", f"not UTF-8: {e.reason} at byte {e.start}") from None


def _error_of(data: bytes) -> ErrorInfo:
    """Decode an event named ``error``, whose data is JSON or text. Raises Malformed."""
    try:
        return provider_failure(read(_anything, data, "error event"))
    except Malformed:
        if is_unfinished(data):
            raise
        return provider_failure(data.decode())


def finish_of(reported: n.FinishReason, completed_calls: int) -> n.FinishReason:
    """Reconcile the finish reason with the tool calls (providers.md, "For all four", 5).

    A provider that reports stop after complete calls means tool use. One that reports tool use without any call is not
    trusted. So `tool_use` always comes with a call to run, or to allow.
    """
    if reported == "stop" and completed_calls:
        return "tool_use"
    if reported == "tool_use" and not completed_calls:
        return "unknown"
    return reported

"""Parses server-sent events. Chunk boundaries never change the result; time is linear in the input.

Follows the standard (lines end in LF, CRLF or CR; a leading BOM is skipped; data lines are joined with a line feed;
comments and unknown fields are ignored; a blank line ends the event), plus what real provider streams require
(providers.md, "Framing"):

- the last event may lack its blank line and even its line end;
- a field line ``error: {json}`` is an event named ``error``;
- unframed JSON, on one or more lines, is an event; of a JSON array, each element is one.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

MAX_EVENT_BYTES = 4 * 2**20
"""Maximum size of an event, and of a bare JSON body."""
MAX_IMAGE_EVENT_BYTES = 32 * 2**20
"""The same for an API whose events hold generated images: 20 MB take 27 MB as base64."""
MAX_IDLE_LINES = 100_000
"""Maximum number of lines without content in one body: comments, blank lines that end no event, unknown fields. With
one comment per second, as some providers send while a model thinks, this lasts a day.
"""
MAX_COMMENT_BYTES = 2 * 2**20
"""Maximum bytes of comments in one body. This lasts as long for comments as short as those."""

_BOM = b"\xef\xbb\xbf"
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One event: its data lines joined (never blank), and the name from its `event:` line, if any."""

    data: bytes
    name: bytes = b""


class SseDecoder(msgspec.Struct):
    """Turns bytes into events. Its fields are its whole state. Never raises; ``limit`` bounds its memory.

    An event or line over ``limit`` bytes sets ``oversize``, and so do more than ``MAX_IDLE_LINES`` lines without
    content, or ``MAX_COMMENT_BYTES`` of comments. After that it emits nothing.
    """

    limit: int = MAX_EVENT_BYTES
    oversize: bool = False
    begun: bool = False
    """The check for a byte order mark is done."""
    after_cr: bool = False
    """The last byte was a CR; an LF that follows belongs to it."""
    line: bytearray = msgspec.field(default_factory=bytearray)
    """The beginning of an incomplete line."""
    name: bytes = b""
    first: bytes | None = None
    """The first data line of the open event."""
    more: bytearray = msgspec.field(default_factory=bytearray)
    """Its further data lines, each preceded by a line feed."""
    bare: bytearray = msgspec.field(default_factory=bytearray)
    """Lines of JSON outside any event."""
    idle: int = 0
    """Lines without content so far."""
    comment_bytes: int = 0
    """Bytes of comments so far."""

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the events that these bytes complete."""
        if not self.begun:
            data = self._without_bom(data)
        if not data or self.oversize:
            return []
        if self.after_cr:
            self.after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self.after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        if self.line:
            self.line += lines[0]
            lines[0] = b""
            if len(lines) > 1:
                lines[0] = bytes(self.line)
                self.line.clear()
        rest = lines.pop()
        if rest:
            self.line += rest
        events: list[SseEvent] = []
        self._read(lines, events)
        if len(self.line) > self.limit:
            self.oversize = True
            self._discard()
        return events

    def end(self) -> list[SseEvent]:
        """Handle the end of the body: an open event is returned as well, complete or not."""
        events: list[SseEvent] = []
        if self.line:
            line = bytes(self.line)
            self.line.clear()
            self._read([line], events)
        self._flush(events)
        return events

    def _without_bom(self, data: bytes) -> bytes:
        head = bytes(self.line) + data
        self.line.clear()
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self.line += head
            return b""
        self.begun = True
        return head.removeprefix(_BOM)

    def _read(self, lines: list[bytes], events: list[SseEvent]) -> None:
        limit = self.limit
        for line in lines:
            if len(line) > limit:
                self.oversize = True
            elif line.startswith(b"data:"):
                if self.bare:
                    self._flush(events)
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                if self.first is None:
                    self.first = value
                elif len(self.first) + len(self.more) + len(value) < limit:
                    self.more += b"\n" + value
                    self.idle += not value
                else:
                    self.oversize = True
            elif not line:
                if self.first is None:
                    self.idle += 1
                if not self.bare:
                    self._dispatch(events)
            elif line.startswith(b"event:"):
                if self.bare:
                    self._flush(events)
                self.idle += bool(self.name)
                self.name = line[6:].strip()
            else:
                if line.startswith(b":"):
                    self.comment_bytes += len(line)
                    self.oversize = self.comment_bytes > MAX_COMMENT_BYTES
                else:
                    self._unknown_line(line, events)
                    self.oversize = len(self.bare) > limit
                self.idle += not self.bare
            if self.oversize or self.idle > MAX_IDLE_LINES:
                self.oversize = True
                return self._discard()
        return None

    def _unknown_line(self, line: bytes, events: list[SseEvent]) -> None:
        """Handle a line that is not blank, a comment, ``data:`` or ``event:``."""
        if self.bare or line.lstrip()[:1] in (b"{", b"["):
            if self.first is not None:
                self._dispatch(events)
            self.bare += line + b"\n"
            return
        field, _, value = line.partition(b":")
        if field == b"error":
            self._dispatch(events)
            self.name = b"error"
            self.first = value.removeprefix(b" ")

    def _dispatch(self, events: list[SseEvent]) -> None:
        """End the open event. Drop it if its data is missing or blank."""
        if self.first is not None:
            data = self.first
            if self.more:
                data += self.more
                self.more.clear()
            if data and not data.isspace():
                events.append(SseEvent(data, self.name))
            self.first = None
        self.name = b""

    def _flush(self, events: list[SseEvent]) -> None:
        """End an open event: bare JSON, or an event without its final blank line."""
        if not self.bare:
            self._dispatch(events)
            return
        body = bytes(self.bare).strip()
        self.bare.clear()
        elements = [msgspec.Raw(body)]
        if body.startswith(b"["):
            with suppress(msgspec.MsgspecError, RecursionError):
                elements = _elements.decode(body)
        events += [SseEvent(bytes(element)) for element in elements]

    def _discard(self) -> None:
        """Over the limit: drop all buffers."""
        self.first = None
        for held in (self.line, self.more, self.bare):
            held.clear()

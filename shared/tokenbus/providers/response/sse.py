"""Server-sent events from bytes: any cutting of the bytes gives the same events, in time linear in their number.

The standard's rules (lines end in LF, CRLF or CR; a leading BOM is skipped; data lines join with a line feed;
comments and unknown fields are nothing; a blank line ends the event), and what real provider streams add to it
(providers.md, "Framing"):

- the last event may lack its blank line, and even its line end;
- a field line ``error: {json}`` is an event of the name ``error``;
- JSON without any framing, over one or many lines, is an event of its own; of a JSON array each element is one.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

MAX_EVENT_BYTES = 8 * 2**20
"""Largest event, and largest body that is bare JSON."""
MAX_IMAGE_EVENT_BYTES = 32 * 2**20
"""The same for an API whose events hold generated images: one of 20 MB takes 27 MB as base64."""
MAX_IDLE_LINES = 100_000
"""Most lines of one body that say nothing: comments, blank lines that end no event, fields that nobody knows. With a
comment a second, as some send while a model thinks, that is a day."""

_BOM = b"\xef\xbb\xbf"
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One event: its data lines joined, never blank, and the name of its `event:` line, if it had one."""

    data: bytes
    name: bytes = b""


class SseDecoder(msgspec.Struct):
    """Bytes in, events out. Its fields are its whole state. Never raises; memory is bounded by ``limit``.

    An event or a line over ``limit`` bytes sets ``oversize``, and so does one line over ``MAX_IDLE_LINES`` that says
    nothing; from then on nothing more comes out.
    """

    limit: int = MAX_EVENT_BYTES
    oversize: bool = False
    begun: bool = False
    """A byte order mark has been looked for."""
    after_cr: bool = False
    """The last byte was a CR: a LF that follows belongs to it."""
    line: bytearray = msgspec.field(default_factory=bytearray)
    """The beginning of a line whose end has not come."""
    name: bytes = b""
    first: bytes | None = None
    """The first data line of the open event."""
    more: bytearray = msgspec.field(default_factory=bytearray)
    """Its further data lines, each with a line feed before it."""
    bare: bytearray = msgspec.field(default_factory=bytearray)
    """Lines of JSON that stand outside of any event."""
    idle: int = 0
    """Lines that said nothing."""

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that these bytes complete."""
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
            self._give_up()
        return events

    def end(self) -> list[SseEvent]:
        """The body ended: what was still open is an event too, whole or cut."""
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
                if not line.startswith(b":"):
                    self._odd_line(line, events)
                    self.oversize = len(self.bare) > limit
                self.idle += not self.bare
            if self.oversize or self.idle > MAX_IDLE_LINES:
                self.oversize = True
                return self._give_up()
        return None

    def _odd_line(self, line: bytes, events: list[SseEvent]) -> None:
        """A line that is no blank, comment, ``data:`` or ``event:``."""
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
        """End the open event. One without data, or with blank data only, is none."""
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
        """End what is open: bare JSON, or an event whose blank line never came."""
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

    def _give_up(self) -> None:
        """Something is over the limit: keep nothing."""
        self.first = None
        for held in (self.line, self.more, self.bare):
            held.clear()

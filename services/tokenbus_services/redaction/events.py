"""Finds secrets that a provider spreads over several events, as when a model writes one token by token.

Consecutive strings under the same JSON key are treated as one text: `content` of a chat, `text`, `thinking` and
`partial_json` of a block, `arguments` of a call. If a string may end in the beginning of a secret, that tail is
remembered. Once it has `HELD_CHARS` characters of a secret, its event is held back for the next ones. Nothing else is
delayed, and events of a stream without such a tail are scanned once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from tokenbus_services.redaction.redactor import MARK, RedactedStream, Redaction
from tokenbus_services.redaction.secret_beginnings import HELD_CHARS, VALUE_ENDS

MAX_HELD_LINES = 48
"""About 16 events. A tail followed by this many lines is emitted, rather than delaying what follows."""
MAX_HELD_BYTES = 2**20
MAX_LINE_BYTES = 256 * 2**10
"""A longer line is an image, not a delta; it is passed on as it is read."""
MAX_TAILS = 256

_STRING = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*:)?')
_INDEX = re.compile(rb'"[A-Za-z_]{0,16}[iI]ndex"\s*:\s*([0-9]{1,9})')
_LINE_END = re.compile(rb"[\r\n]")
_OPEN_ESCAPE = re.compile(
    rb"(?:\\\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?|%[0-9a-fA-F]?|&(?:\#[xX]?[0-9a-fA-F]{0,19}|[A-Za-z]{0,24}))"
    + VALUE_ENDS
)


class _Line(msgspec.Struct, eq=False):
    data: bytes
    edits: list[tuple[int, int, bytes]] = []
    """Replacements: begin, end, new bytes."""
    out: bool = False

    def render(self) -> bytes:
        """The line with its replacements."""
        self.out = True
        clean = bytearray()
        done = 0
        for begin, end, instead in sorted(self.edits):
            if begin >= done:  # two readings of one line find the same secret
                clean += self.data[done:begin] + instead
            done = max(done, end)
        rest, self.data = self.data[done:], b""
        return bytes(clean) + rest


class _Tail(msgspec.Struct, eq=False):
    """The end of one text, which may be the beginning of a secret."""

    raw: bytes
    pieces: list[tuple[_Line, int, int]]
    """Its location: line, first byte and length."""
    chars: int
    """Maximum number of secret characters in it."""
    telling: bool
    """Long enough to be redacted even if the rest never arrives."""

    @property
    def holds(self) -> bool:
        """Whether its lines are held back."""
        return self.chars >= HELD_CHARS


class RedactedEvents:
    """Redacts a stream of server-sent events or JSON lines: call `feed` with all data read, then `end`."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._within: RedactedStream = redaction.stream()
        """Finds secrets within one event."""
        self._line = bytearray()
        """The beginning of an incomplete line, which readers cannot use yet."""
        self._giant = False
        self._held: list[_Line] = []
        self._tails: dict[tuple[bytes, ...], _Tail] = {}

    def feed(self, data: bytes) -> bytes:
        """Add data. Return what can be emitted, which may be empty."""
        data = self._within.feed(data)
        if not (data and self._redaction):
            return data
        if not (self._line or self._held or self._giant) and data.endswith(b"\n") and not self._concerns(data):
            return data  # the usual case
        return self._take(data)

    def end(self) -> bytes:
        """Return the rest at the end of the stream."""
        data = self._within.end()
        out = self._take(data) if data else b""
        if self._line:
            self._read(bytes(self._line))
            self._line.clear()
        return out + self._give_up()

    def _concerns(self, data: bytes) -> bool:
        """Whether a text in it may end in the beginning of a secret, or continue one."""
        return self._begins(data, 0, len(data)) or any(channel[0] in data for channel in self._tails)

    def _begins(self, data: bytes, begin: int, end: int) -> bool:
        if self._redaction.heads.search(data, begin, end):
            return True
        if data.find(b"\\", begin, end) < 0 and data.find(b"%", begin, end) < 0 and data.find(b"&", begin, end) < 0:
            return False
        return self._redaction.may_be_escaped(data, begin, end) or _OPEN_ESCAPE.search(data, begin, end) is not None

    def _take(self, data: bytes) -> bytes:
        out = b""
        if self._giant:
            end = _LINE_END.search(data)
            cut = end.end() if end else len(data)
            self._giant = end is None
            out, data = data[:cut], data[cut:]
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if cut:
            lines = data[:cut].splitlines(keepends=True)
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
            for line in lines:
                self._read(line)
            out += self._release()
        self._line += data[cut:]
        if len(self._line) > MAX_LINE_BYTES:
            out += self._give_up() + bytes(self._line)
            self._line.clear()
            self._giant = True
        return out

    def _read(self, data: bytes) -> None:
        line = _Line(data)
        self._held.append(line)
        if not self._concerns(data):
            return
        indices = tuple(_INDEX.findall(data))
        key = b'""'
        for string in _STRING.finditer(data):
            if string[2]:
                key = data[string.start() : string.end(1) + 1]
                continue
            # Parallel calls are distinguished by index, but not every event of a text has one.
            for channel in ((key,), (key, *indices)) if indices else ((key,),):
                self._value(channel, line, *string.span(1))

    def _value(self, channel: tuple[bytes, ...], line: _Line, begin: int, end: int) -> None:
        tail = self._tails.pop(channel, None)
        if begin == end:
            if tail:
                self._tails[channel] = tail  # an empty delta changes nothing
            return
        if not (tail or self._begins(line.data, begin, end + 1)):
            return
        raw = (tail.raw if tail else b"") + line.data[begin:end]
        pieces = [*(tail.pieces if tail else ()), (line, begin, end - begin)]
        done = 0
        if tail:
            for first, last in self._redaction.found(raw):
                if first < len(tail.raw) < last:
                    self._cut_out(pieces, first, last)
                    done = last
        at, chars, telling = self._redaction.opened(raw[done:])
        if done + at < len(raw):
            if len(self._tails) >= MAX_TAILS:
                del self._tails[next(iter(self._tails))]
            left = list(_part(pieces, done + at, len(raw)))
            self._tails[channel] = _Tail(raw[done + at :], left, chars, telling)

    def _cut_out(self, pieces: Iterable[tuple[_Line, int, int]], first: int, last: int) -> None:
        """Remove these bytes of a text from its lines; the mark replaces the last of them."""
        parts = list(_part(pieces, first, last))
        for n, (line, begin, size) in enumerate(parts, 1):
            line.edits = [*line.edits, (begin, begin + size, MARK.encode() if n == len(parts) else b"")]

    def _release(self) -> bytes:
        """Emit the lines before the first one that is held back."""
        waiting = {id(line) for tail in self._tails.values() if tail.holds for line, _, _ in tail.pieces}
        places = [n for n, line in enumerate(self._held) if id(line) in waiting] if waiting else []
        here, last = (places[0], places[-1]) if places else (len(self._held), len(self._held))
        idle = len(self._held) - last
        out = b"".join([line.render() for line in self._held[:here]])
        del self._held[:here]
        many = idle > MAX_HELD_LINES or sum(len(line.data) for line in self._held) > MAX_HELD_BYTES
        return out + self._give_up() if many else out

    def _give_up(self) -> bytes:
        """Emit all held-back lines, without parts that are nearly a secret."""
        for tail in self._tails.values():
            if tail.telling:
                self._cut_out([piece for piece in tail.pieces if not piece[0].out], 0, len(tail.raw))
        out = b"".join([line.render() for line in self._held])
        self._held.clear()
        return out


def _part(pieces: Iterable[tuple[_Line, int, int]], first: int, last: int) -> Iterable[tuple[_Line, int, int]]:
    """The pieces that hold these bytes of their text."""
    at = 0
    for line, begin, size in pieces:
        low, high = max(first, at), min(last, at + size)
        if low < high:
            yield line, begin + low - at, high - low
        at += size

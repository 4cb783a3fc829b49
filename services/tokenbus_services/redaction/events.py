"""Finds secrets that a provider spreads over several strings, as when a model writes one token by token.

Strings are joined as a reader of the answer joins them: those at one place of its JSON (`json_strings`), such as the
`content` of a chat or the `text` of the block with this index, and, for other ways of reading, those under one key. If
a string may end in the beginning of a secret, that tail is remembered. Once it has `HELD_CHARS` characters of a secret,
its event is held back for the next ones. Nothing else is delayed, and events of a stream without such a tail are
scanned once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import msgspec

from tokenbus_services.redaction.json_strings import MAX_MARK_BYTES, JsonStrings, Place
from tokenbus_services.redaction.redactor import HELD_CHARS, MARK, VALUE_ENDS, RedactedStream, Redaction

MAX_HELD_LINES = 48
"""About 16 events. A tail followed by this many lines is emitted, rather than delaying what follows."""
MAX_HELD_BYTES = 2**20
MAX_LINE_BYTES = 256 * 2**10
"""A longer line is an image, not a delta; it is read and passed on as it arrives."""
MAX_TAILS = 8192
"""No answer has as many texts that all end in the beginning of a secret. The tails of further ones are redacted."""
FEW_KEYS = 8
"""More keys than these are looked up in data by its strings, instead of one by one."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LINE_END = re.compile(rb"[\r\n]")
_STRING_HEAD = re.compile(rb'"(?=([^"\\\\]{0,%d}))' % MAX_MARK_BYTES)
"""What follows each quotation mark: every key is one of these."""
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
        """Whether this line is passed on in pieces."""
        self._after_return = False
        """Whether the last line ended in a carriage return, which a line feed may complete."""
        self._strings, self._read_any = JsonStrings(), False
        """Of the present event, and whether they are in use."""
        self._reading: _Line | None = None
        """The first line whose strings wait for the end of their event."""
        self._unread = bytearray()
        """The lines of the present event that its strings were not looked for in, as they concern no secret."""
        self._held: list[_Line] = []
        self._tails: dict[tuple[bytes, Place], _Tail] = {}
        """By the key, and the place under which it is remembered; None: the key alone."""
        self._keys: Counter[bytes] = Counter()
        """How many tails each key has."""
        self._holding: dict[tuple[bytes, Place], _Tail] = {}
        """Those tails whose lines are held back."""

    def feed(self, data: bytes) -> bytes:
        """Add data. Return what can be emitted, which may be empty."""
        data = self._within.feed(data)
        if not (data and self._redaction):
            return data
        if not (self._line or self._held or self._giant) and data.endswith(_EVENT_ENDS) and not self._concerns(data):
            self._end_event()
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
        if self._begins(data, 0, len(data)):
            return True
        if not self._keys:
            return False
        if len(self._keys) <= FEW_KEYS:
            return b"\\u" in data or any(key in data for key in self._keys)
        return b"\\u" in data or not self._keys.keys().isdisjoint(_STRING_HEAD.findall(data))

    def _begins(self, data: bytes, begin: int, end: int) -> bool:
        if self._redaction.heads.search(data, begin, end):
            return True
        if data.find(b"\\", begin, end) < 0 and data.find(b"%", begin, end) < 0 and data.find(b"&", begin, end) < 0:
            return False
        return self._redaction.may_be_escaped(data, begin, end) or _OPEN_ESCAPE.search(data, begin, end) is not None

    def _take(self, data: bytes) -> bytes:
        self._line += data
        cut = max(self._line.rfind(b"\n"), self._line.rfind(b"\r")) + 1
        if self._giant or len(self._line) - cut > MAX_LINE_BYTES:
            self._giant, cut = cut < len(self._line), len(self._line)
        whole = bytes(self._line[:cut])
        del self._line[:cut]
        for line in whole.splitlines(keepends=True):
            self._read(line)
        return self._release() if cut else b""

    def _read(self, data: bytes) -> None:
        """Look for strings in a line, or in a piece of one that is too long."""
        line = _Line(data)
        self._held.append(line)
        completes, self._after_return = self._after_return and data == b"\n", data.endswith(b"\r")
        if completes:
            return
        if not data.strip(b"\r\n"):
            self._end_event()  # its end
            return
        waits = not (self._reading or self._giant or len(self._unread) > MAX_LINE_BYTES)
        if waits and not self._concerns(data):
            self._unread += data
            return
        if self._unread:
            self._strings.feed(bytes(self._unread))
            self._strings.take()
            self._unread.clear()
        self._reading = self._reading or line
        self._strings.feed(data, line)
        self._read_any = True
        if self._strings.complete or self._giant:
            self._join()

    def _join(self) -> None:
        """Join the strings that were found to the texts at their places."""
        self._reading = None
        for string in self._strings.take():
            for place in (None, string.place):
                self._value((string.key, place), string.line, string.begin, string.end)

    def _end_event(self) -> None:
        if self._read_any:
            self._join()
            self._strings, self._read_any = JsonStrings(), False
        self._unread.clear()

    def _value(self, channel: tuple[bytes, Place], line: _Line, begin: int, end: int) -> None:
        if begin == end:  # an empty delta changes nothing
            return
        tail = self._forget(channel)
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
                self._cut_out(pieces, done + at, len(raw))
                return
            left = list(_part(pieces, done + at, len(raw)))
            self._remember(channel, _Tail(raw[done + at :], left, chars, telling))

    def _remember(self, channel: tuple[bytes, Place], tail: _Tail) -> None:
        self._tails[channel] = tail
        self._keys[channel[0]] += 1
        if tail.holds:
            self._holding[channel] = tail

    def _forget(self, channel: tuple[bytes, Place]) -> _Tail | None:
        tail = self._tails.pop(channel, None)
        if tail:
            self._holding.pop(channel, None)
            self._keys[channel[0]] -= 1
            if not self._keys[channel[0]]:
                del self._keys[channel[0]]
        return tail

    def _cut_out(self, pieces: Iterable[tuple[_Line, int, int]], first: int, last: int) -> None:
        """Remove these bytes of a text from its lines; the mark replaces the last of them."""
        parts = list(_part(pieces, first, last))
        for n, (line, begin, size) in enumerate(parts, 1):
            line.edits = [*line.edits, (begin, begin + size, MARK.encode() if n == len(parts) else b"")]

    def _release(self) -> bytes:
        """Emit the lines before the first one that is held back."""
        waiting = {id(line) for tail in self._holding.values() for line, _, _ in tail.pieces}
        if self._reading:
            waiting.add(id(self._reading))
        places = [n for n, line in enumerate(self._held) if id(line) in waiting] if waiting else []
        here, last = (places[0], places[-1]) if places else (len(self._held), len(self._held))
        idle = len(self._held) - last
        out = b"".join([line.render() for line in self._held[:here]])
        del self._held[:here]
        many = idle > MAX_HELD_LINES or sum(len(line.data) for line in self._held) > MAX_HELD_BYTES
        return out + self._give_up() if many else out

    def _give_up(self) -> bytes:
        """Emit all held-back lines, without parts that are nearly a secret."""
        self._join()
        for tail in self._holding.values():
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

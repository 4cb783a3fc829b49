"""Finds secrets that a provider spreads over several strings, as when a model writes one token by token.

Strings are joined as a reader of the answer joins them: those at one place of its JSON (`json_strings`), such as the
`content` of a chat or the `text` of the block with this index, and, for other ways of reading, those under one key. If
a string may end in the beginning of a secret, that tail is remembered. Once it has `HELD_CHARS` characters of a secret,
its event is held back for the next ones. Nothing else is delayed, and events of a stream without such a tail are
scanned once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import msgspec

from tokenbus_services.redaction.redactor import HELD_CHARS, MARK, VALUE_ENDS, RedactedStream, Redaction

# An event is server-sent, with its JSON on one or several ``data`` lines, or a line of JSON. What is no JSON is
# skipped.


MAX_DEPTH = 64
"""Deeper values count as of this depth."""
MAX_MARK_BYTES = 64

_STRING = re.compile(rb'([^"\\\r\n]*+(?:\\[^\r\n][^"\\\r\n]*+)*+)("?)')
_TOKEN = re.compile(rb'(")|([{}\[\],:])|(-?[0-9]{1,9})|(\r\n|\r|\n)')
_OTHER_FIELD = re.compile(rb"(?:event|id|retry)?:[^\r\n]*")
_DATA = b"data:"
_MARKS = frozenset({b"type", b"item_id"})

Place: TypeAlias = Hashable


class _Frame(msgspec.Struct, eq=False):
    """An open object or list."""

    is_object: bool
    key: bytes
    """The last key of the object, or of the object around the list."""
    expects_key: bool
    marks: dict[bytes, bytes] = {}
    """What distinguishes objects of one place: indexes, and types."""


class JsonString(msgspec.Struct, eq=False):
    """A string value, or a piece of one that the data cuts: its bytes without quotes, and where a reader joins it."""

    key: bytes
    """The key that it stands under, also if it is in a list."""
    path: tuple[tuple[bytes, _Frame], ...]
    """The keys above it and at it, each with its object or list."""
    line: Any
    """The data that holds it, as given to `JsonStrings.feed`."""
    begin: int
    end: int

    @property
    def place(self) -> Place:
        """The keys of its path, with the indexes and types beside them. Complete at the end of the event."""
        return tuple((name, *sorted(frame.marks.items())) for name, frame in self.path)


class JsonStrings:
    """Give it the data of an event, piece by piece, and take its strings when it is `complete`."""

    def __init__(self) -> None:
        self._found: dict[Hashable, JsonString] = {}
        """By what makes a value count once."""
        self._stack: list[_Frame] = []
        self._beyond = 0
        """Open objects and lists deeper than `MAX_DEPTH`."""
        self._line_starts = True
        self._after_return = False
        """Whether the data ended in a carriage return, which a line feed may complete."""
        self._inside: bool = False
        """Whether the data ended inside a string, ..."""
        self._after_backslash = False
        """... right after a backslash, ..."""
        self._key_so_far: bytes | None = None
        """... which is a key. This much of it is known."""

    @property
    def complete(self) -> bool:
        """Whether no object or list is open."""
        return not (self._stack or self._inside)

    def take(self) -> list[JsonString]:
        """The string values since the last call, in order. Of a key that an object has twice, the last value counts."""
        found, self._found = list(self._found.values()), {}
        return found

    def feed(self, data: bytes, line: Any = None) -> None:
        """Read data; ``line`` is what its strings name as their data."""
        at = 0
        if self._after_return and data[:1] == b"\n":
            at = 1
        self._after_return = data[-1:] == b"\r"
        if self._inside:
            at = self._string(data, at, line)
        while True:
            if self._line_starts:
                at = self._field(data, at)
            token = _TOKEN.search(data, at)
            if token is None:
                break
            self._line_starts = False
            at = token.end()
            match token.lastindex:
                case 1:
                    at = self._string(data, at, line)
                case 2:
                    self._punctuation(token[2])
                case 3:
                    self._number(token[3])
                case _:
                    self._line_starts = True

    def _field(self, data: bytes, at: int) -> int:
        """The beginning of a line: skip the name of its field, or all of a field that is no data."""
        if data[at : at + 1] in (b"\r", b"\n"):  # an empty line ends the event
            self._stack, self._beyond = [], 0
        elif data.startswith(_DATA, at):
            return at + len(_DATA)
        elif other := _OTHER_FIELD.match(data, at):
            return other.end()
        return at

    def _string(self, data: bytes, at: int, line: Any) -> int:
        """Read a string, or its rest, from here; return where it ends."""
        match = _STRING.match(data, at + self._after_backslash)
        end, closed = (match.end(1), bool(match[2])) if match else (len(data), False)
        cut = not closed and end >= len(data) - (data[end : end + 1] == b"\\")
        top = self._stack[-1] if self._stack else None
        if not self._inside:
            self._key_so_far = b"" if top and top.expects_key else None
        if self._key_so_far is not None:
            self._key_so_far = (self._key_so_far + data[at:end])[:MAX_MARK_BYTES]
            if not cut and top:
                top.key = _decoded(self._key_so_far)
        else:
            key = top.key if top else b""
            path = tuple((frame.key, frame) for frame in self._stack)
            which: Hashable = (id(top), key) if top and top.is_object and not self._inside else len(self._found)
            self._found.pop(which, None)
            self._found[which] = JsonString(key, path, line, at, end)
            if not cut and top and key in _MARKS and end - at <= MAX_MARK_BYTES:
                top.marks[key] = data[at:end]
        self._inside, self._after_backslash = cut, cut and end < len(data)
        return len(data) if cut else end + closed

    def _punctuation(self, char: bytes) -> None:
        top = self._stack[-1] if self._stack else None
        match char:
            case b"{" | b"[":
                if len(self._stack) < MAX_DEPTH:
                    self._stack.append(_Frame(char == b"{", top.key if top else b"", char == b"{"))
                else:
                    self._beyond += 1
            case b"}" | b"]":
                if self._beyond:
                    self._beyond -= 1
                elif top:
                    self._stack.pop()
            case _:
                if top and top.is_object:
                    top.expects_key = char == b","

    def _number(self, number: bytes) -> None:
        top = self._stack[-1] if self._stack else None
        if top and top.is_object and not top.expects_key and top.key.lower().endswith(b"index"):
            top.marks[top.key] = number


def _decoded(key: bytes) -> bytes:
    """A key without its escapes."""
    if b"\\" not in key:
        return key
    try:
        return json.loads(b'"' + key + b'"').encode(errors="surrogatepass")
    except ValueError:  # no JSON, which no reader reads
        return key


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

"""Reads the strings in the JSON of an answer's events, each with its place. The data may be cut anywhere. No IO.

An event is server-sent, with its JSON on one or several ``data`` lines, or a line of JSON. What is no JSON is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from typing import Any, TypeAlias

import msgspec

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

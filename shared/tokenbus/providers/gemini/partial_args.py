"""Writes the JSON text of call arguments that arrive in pieces, piece by piece.

The API (Vertex, if `streamFunctionCallArguments` is requested) gives the location of each value as a JSON path (RFC
9535) of keys and indexes, and splits long strings. Pieces arrive in the order in which the model wrote them; a location
is never revisited.
"""

from __future__ import annotations

import json
import re

import msgspec

from tokenbus.errors import Malformed
from tokenbus.providers.gemini.wire import PartialArg
from tokenbus.providers.response.json_decode import is_null

MAX_DEPTH = 64

_SEGMENT = re.compile(
    r"""\.([^.\[\]'"]+)|\[(\d{1,9})\]|\['((?:[^'\\]|\\.)*)'\]|\["((?:[^"\\]|\\.)*)"\]""",
    re.DOTALL,
)
_QUOTES = re.compile(r"""\\.|\"""", re.DOTALL)
_encode = msgspec.json.encode

Segment = str | int
"""An object key or an array index."""


class ArgsWriter(msgspec.Struct):
    """The state of the text written so far. Its fields are its whole state."""

    path: list[Segment] = []
    """Path of the last value; all its containers are open."""
    in_string: bool = False
    """The last value is a string that may continue."""
    keys: list[set[str]] = []
    """Keys written so far in each open object, to reject duplicates; empty for an array."""

    def write(self, piece: PartialArg) -> str:
        """Return the text that this piece adds. Raises Malformed."""
        value = _text_of(piece)
        if value is None:
            return ""
        path = parse(piece.json_path)
        if path == self.path and self.in_string and piece.string_value is not None:
            return value[1:-1]
        if path[: len(self.path)] == self.path[: len(path)] and self.path:
            raise Malformed("partialArgs", f"{piece.json_path} already has a value")
        common = next((i for i, (a, b) in enumerate(zip(self.path, path, strict=False)) if a != b), 0)
        text = self._leave(common) + self._enter(path, common)
        self.path = path
        self.in_string = piece.string_value is not None
        return text + (value[:-1] if self.in_string else value)

    def end(self) -> str:
        """Return the text that closes everything still open."""
        return self._leave(0) + "}" if self.path else "{}"

    def _leave(self, depth: int) -> str:
        """Close the last value and its containers down to ``depth``."""
        text = '"' if self.in_string else ""
        for inner in reversed(self.path[depth + 1 :]):
            text += "}" if isinstance(inner, str) else "]"
            self.keys.pop()
        return text

    def _enter(self, path: list[Segment], depth: int) -> str:
        """Open the location of the next value, starting from the open container at ``depth``."""
        text = ""
        for at in range(depth, len(path)):
            segment = path[at]
            new = at > depth or not self.path
            if new:
                text += "{" if isinstance(segment, str) else "["
                self.keys.append(set())
            elif isinstance(segment, str) is not isinstance(self.path[at], str):
                raise Malformed("partialArgs", "a container is used as both an object and an array")
            else:
                text += ","
            if isinstance(segment, str):
                if segment in self.keys[at]:
                    raise Malformed("partialArgs", f"duplicate key {segment!r}")
                self.keys[at].add(segment)
                text += f"{_encode(segment).decode()}:"
            elif segment != (0 if new else int(self.path[at]) + 1):
                raise Malformed("partialArgs", f"index {segment} is out of order")
        return text


def parse(path: str) -> list[Segment]:
    """Parse a JSON path into keys and indexes. Raises Malformed unless it names a single location in an object."""
    segments: list[Segment] = []
    at = 1
    while at < len(path) and len(segments) < MAX_DEPTH and (found := _SEGMENT.match(path, at)):
        name, index, single, double = found.groups()
        if index is not None:
            segments.append(int(index))
        else:
            segments.append(name if name is not None else _unescaped(single if single is not None else double))
        at = found.end()
    if not path.startswith("$") or at < len(path) or not segments or not isinstance(segments[0], str):
        raise Malformed("partialArgs", f"unsupported path {path[:100]!r}")
    return segments


def _unescaped(quoted: str) -> str:
    """A quoted name without its escapes: those of JSON strings, and of single quotes. Raises Malformed."""
    inner = _QUOTES.sub(lambda found: {"\\'": "'", '"': '\\"'}.get(found[0], found[0]), quoted)
    try:
        name: str = json.loads(f'"{inner}"', strict=False)  # a name may have a raw line break
        name.encode()
    except ValueError:
        raise Malformed("partialArgs", f"unsupported name {quoted[:100]!r}") from None
    return name


def _text_of(piece: PartialArg) -> str | None:
    """The value as JSON; None if the piece has none."""
    if piece.string_value is not None:
        return _encode(piece.string_value).decode()
    if piece.bool_value is not None:
        return "true" if piece.bool_value else "false"
    if not is_null(piece.number_value):
        return bytes(piece.number_value).decode()
    return "null" if bytes(piece.null_value) else None

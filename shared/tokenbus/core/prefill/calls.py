"""Parse a call: its parameters become pieces of one JSON object."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from tokenbus.core.prefill.tag_scanner import BLANKS
from tokenbus.errors import TooLarge, undecodable
from tokenbus.events.normalized import Normalized, ToolCallDelta, ToolCallDone, ToolCallStart

_JSON_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def call_id(seed: str, ordinal: int) -> str:
    """Deterministic id of the turn's call with this ordinal, equal in every replay. ``seed`` identifies run and
    turn.
    """
    return "call_" + sha256(f"{seed}\0{ordinal}".encode()).hexdigest()[:24]


class OpenCall(msgspec.Struct):
    """A call that has started and not ended."""

    block: int
    types: dict[str, list[str]]
    """JSON types by parameter; parameters not in it are text."""
    stray: bool = False
    """Parameters outside a call; together they form one call without a name."""
    problem: str = ""
    """Why the call is malformed, if it is; it then never runs."""
    names: list[str] = []
    key: str = ""
    """Name of the open parameter."""
    ignored: bool = False
    """The open parameter has no name or a duplicate one, so its value is dropped."""
    pieces: list[str] = []
    """Value of the open parameter, if it is parsed at its end."""
    size: int = 0

    @classmethod
    def start(
        cls, block: int, tool_id: str, name: str, types: dict[str, list[str]], out: list[Normalized], *, stray: bool
    ) -> OpenCall:
        out.append(ToolCallStart(block, tool_id, name))
        problem = "a parameter is outside of a call" if stray else "the call has no name"
        return cls(block, types, stray, "" if name else problem)

    def open_parameter(self, name: str | None, out: list[Normalized]) -> None:
        """Start a parameter. Text is streamed; other types are parsed at the parameter's end."""
        self.ignored = name is None or name in self.names
        if name is None:
            self.problem = self.problem or "a parameter has no name"
            return
        if self.ignored:
            self.problem = self.problem or f"the parameter {name!r} appears twice"
            return
        self.key = name
        self.pieces, self.size = [], 0
        if self._streams:
            self._write(f'{self._head()}"', out)

    def value(self, text: str, limit: int, out: list[Normalized]) -> None:
        """Add to the open parameter. Raises TooLarge if a value that is parsed at its end exceeds ``limit``
        characters.
        """
        if self.ignored:
            return
        if self._streams:
            self._write(_escaped(text), out)
            return
        self.size += len(text)
        if self.size > limit:
            raise TooLarge(f"parameter {self.key}", self.size, limit, unit="characters")
        self.pieces.append(text)

    def close_parameter(self, out: list[Normalized]) -> None:
        if self.ignored:
            return
        if self._streams:
            self._write('"', out)
            self.names.append(self.key)
            return
        value = "".join(self.pieces)
        self.pieces = []
        raw = value.strip(BLANKS)
        problem = self._misread(raw)
        self._write(self._head() + (f'"{_escaped(value)}"' if problem else raw), out)
        self.names.append(self.key)
        if problem and "string" not in self.types[self.key]:
            self.problem = self.problem or f"the parameter {self.key!r} is not JSON: {problem}"

    def finish(self, out: list[Normalized], problem: str = "") -> None:
        """End the call. ``problem``: why it ended without its own closing tag."""
        if not problem:
            self._write("}" if self.names else "{}", out)
        out.append(ToolCallDone(self.block, self.problem or problem))

    @property
    def _streams(self) -> bool:
        return self.key not in self.types

    def _head(self) -> str:
        return f'{"," if self.names else "{"}"{_escaped(self.key)}":'

    def _misread(self, raw: str) -> str:
        """Why the value is not JSON; empty if it is. If text is valid too, the value must be of another type."""
        try:
            read = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as e:
            return undecodable(e)
        types = self.types[self.key]
        if "string" in types and not any(name in types for name in _JSON_TYPES[type(read)] if name != "string"):
            return "it is text"
        return ""

    def _write(self, fragment: str, out: list[Normalized]) -> None:
        out.append(ToolCallDelta(self.block, fragment))


def _escaped(text: str) -> str:
    """Escape text for use between the quotes of a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]

"""Bytes, values and cursors that cannot be read or stored as they are."""

from __future__ import annotations

from tokenbus.errors.base import TokenbusError


class CursorTrimmed(TokenbusError):
    """The cursor is older than the oldest retained entry; the entries in between are lost."""

    code = "cursor_trimmed"

    def __init__(self, key: str, cursor: str, oldest: str) -> None:
        super().__init__(f"{key}: entries after {cursor} were trimmed; the oldest kept is {oldest}")
        self.key = key
        self.cursor = cursor
        self.oldest = oldest


class CursorAhead(TokenbusError):
    """The cursor is newer than the newest entry: it belongs to another run or deployment, or a failover lost entries
    that it had read. Waiting there would never return anything.
    """

    code = "cursor_ahead"

    def __init__(self, key: str, cursor: str, newest: str) -> None:
        super().__init__(f"{key}: the cursor {cursor} is past the newest entry, {newest}")
        self.key = key
        self.cursor = cursor
        self.newest = newest


class NotStorable(TokenbusError):
    """The value given to `sanitize_for_storage` is not JSON. ``where`` is a JSON Pointer to the problem."""

    code = "not_storable"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"value at {where}: {problem}")
        self.where = where
        self.problem = problem


class CircularValue(NotStorable):
    """A list or object contains itself."""

    code = "circular_value"

    def __init__(self, where: str) -> None:
        super().__init__(where, "it contains itself")


class NestedTooDeep(NotStorable):
    """Lists and objects are nested deeper than ``limit``."""

    code = "nested_too_deep"

    def __init__(self, where: str, limit: int) -> None:
        super().__init__(where, f"nested deeper than {limit}")
        self.limit = limit


class WireError(TokenbusError):
    """Bytes that cannot be decoded."""

    code = "wire_error"


class Malformed(WireError):
    """Bytes that are not the expected JSON, msgpack or event."""

    code = "malformed"

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class TooLarge(WireError):
    """An event or buffer exceeds its limit; ``size`` and ``limit`` are counted in ``unit``."""

    code = "too_large"

    def __init__(self, where: str, size: int, limit: int, unit: str = "bytes", *, why: str = "") -> None:
        """``why``: what happened before, without which it would not be here."""
        super().__init__(f"{where}: {size} {unit}, the limit is {limit}{f'; {why}' if why else ''}")
        self.where = where
        self.size = size
        self.limit = limit
        self.unit = unit
        self.why = why


def undecodable(error: Exception) -> str:
    """Why a text is not the JSON that was expected, without the words of Python's own exceptions."""
    match error:
        case RecursionError():
            return "nested too deeply"
        case UnicodeError():
            return "not Unicode text"
        case _:
            return str(error)

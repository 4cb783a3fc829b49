"""Finds the ends of commands and replies of the Redis protocol (RESP 2) in a stream of bytes."""

from __future__ import annotations


def after(data: bytes, at: int = 0) -> int | None:
    """The position after the value that begins at ``at``; None if the value is not complete. Commands are values too.

    Raises ValueError if no value begins there.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, rest = data[at : at + 1], data[at + 1 : end]
    at = end + 2
    match kind:
        case b"+" | b"-" | b":":
            return at
        case b"$":
            size = int(rest)
            whole = at + size + 2 if size >= 0 else at
            return whole if whole <= len(data) else None
        case b"*":
            for _ in range(int(rest)):
                inner = after(data, at)
                if inner is None:
                    return None
                at = inner
            return at
        case _:
            raise ValueError(f"no RESP value begins with {data[at : at + 20]!r}")


def count(data: bytes) -> int | None:
    """The number of whole values in these bytes; None if the last is not complete."""
    at = number = 0
    while at < len(data):
        end = after(data, at)
        if end is None:
            return None
        at, number = end, number + 1
    return number

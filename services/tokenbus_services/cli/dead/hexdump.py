"""Renders undecodable bytes as text for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

MOST_DUMPED = 4096
"""Maximum bytes in a dump; the raw bytes can go to a file."""
_A_LINE = 16


def readable(data: bytes) -> tuple[str, str]:
    """Return the format of the bytes and their text. May contain control characters: escape it before printing."""
    if not data:
        return "empty", ""
    for kind, decode in (("JSON", msgspec.json.decode), ("msgpack", msgspec.msgpack.decode)):
        try:
            value: Any = decode(data)
            if isinstance(value, (dict, list)):  # in msgpack nearly any byte is a number
                return kind, msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
            continue
    try:
        return "text", data.decode()
    except UnicodeDecodeError:
        return "binary", "\n".join(_dump(data))


def _dump(data: bytes) -> Iterator[str]:
    """Yield lines of offset, hexadecimal and ASCII, like hexdump."""
    for at in range(0, min(len(data), MOST_DUMPED), _A_LINE):
        line = data[at : at + _A_LINE]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in line)
        yield f"{at:08x}  {line.hex(' '):<{3 * _A_LINE}} {text}"
    if len(data) > MOST_DUMPED:
        yield f"… {len(data) - MOST_DUMPED} bytes more; --raw gives all of them"

"""JSON on one line, for every character that a client may treat as a line end. Pure."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode
_ESCAPED = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""U+2028, U+2029 and U+0085: `str.splitlines` ends a line there, and so does `httpx.Response.iter_lines`, with which
many clients read event streams. In JSON they occur inside strings only.
"""


def encode_line(value: object) -> bytes:
    """Encode a value as JSON without anything that ends a line."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escaped in _ESCAPED:
            data = data.replace(raw, escaped)
    return data

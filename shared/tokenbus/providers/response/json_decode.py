"""Provider JSON into typed structs that name only the needed fields; what does not fit is an error with its place."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tokenbus.errors import Malformed
from tokenbus.providers.response.surrogates import without

T = TypeVar("T")
Index = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
"""A provider's number of a block, call or choice."""


class _Tagged(msgspec.Struct):
    type: str


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_any_tag = msgspec.json.Decoder(_Tagged)


def read(decoder: msgspec.json.Decoder[T], data: bytes, what: str) -> T:
    """Decode ``data``, which must be UTF-8. ``what`` names it in errors.

    Half a surrogate pair, which some providers write where they cut an emoji in two, reads as U+FFFD: it is
    sound JSON, but no text. Raises Malformed with the place and the problem.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        problem, _, path = str(e).partition(" - at `")
        raise Malformed(f"{what} at {path.rstrip('`')}" if path else what, problem) from None
    except (msgspec.DecodeError, RecursionError) as e:
        if b"\\u" in data and (whole := without(data)) != data:
            return read(decoder, whole, what)
        raise Malformed(what, str(e)) from None


def is_unfinished(data: bytes) -> bool:
    """Whether JSON stops in the middle: at the end of a body that means a body cut short, not a wrong one."""
    bones = _STRING.sub(lambda m: b"" if m[1] else b'"', data)
    return b'"' in bones or sum(bones.count(b) for b in (b"{", b"[")) > sum(bones.count(b) for b in (b"}", b"]"))


def tag_of(data: bytes) -> str:
    """The ``type`` of a JSON object; empty where it has none."""
    try:
        return _any_tag.decode(data).type
    except (msgspec.DecodeError, RecursionError):
        return ""


def text_of(raw: msgspec.Raw) -> str:
    """Raw JSON as text. Its syntax was checked when it was read, and before that its encoding."""
    return bytes(raw).decode()


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a field is absent (the empty default) or null."""
    return bytes(raw) in (b"", b"null")


def is_json(text: str) -> bool:
    """Whether the text is sound JSON."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True

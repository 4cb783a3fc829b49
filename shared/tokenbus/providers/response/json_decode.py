"""Decodes provider JSON into structs that name only the needed fields; errors say where the JSON does not match."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tokenbus.errors import Malformed, undecodable
from tokenbus.providers.response.surrogates import replace_lone_surrogates

T = TypeVar("T")
Index = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
"""A provider's index of a block, call or choice."""


class _Tagged(msgspec.Struct):
    type: str


class _TaggedEvent(msgspec.Struct):
    type: str = msgspec.field(name="event_type")


_tags = {"type": msgspec.json.Decoder(_Tagged), "event_type": msgspec.json.Decoder(_TaggedEvent)}


def read(decoder: msgspec.json.Decoder[T], data: bytes, what: str) -> T:
    """Decode ``data``, which must be UTF-8. ``what`` names it in errors.

    A lone surrogate escape, which some providers write when they split an emoji, is decoded as U+FFFD: it is valid JSON
    but not valid text. Raises Malformed with the location and the problem.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        problem, _, path = str(e).partition(" - at `")
        raise Malformed(f"{what} at {path.rstrip('`')}" if path else what, problem) from None
    except (msgspec.DecodeError, RecursionError) as e:
        if b"\\u" in data and (whole := replace_lone_surrogates(data)) != data:
            return read(decoder, whole, what)
        raise Malformed(what, undecodable(e)) from None


def tag_of(data: bytes, field: str = "type") -> str:
    """Return the ``type`` of a JSON object, or its ``event_type``; empty if it has none."""
    try:
        return _tags[field].decode(data).type
    except (msgspec.DecodeError, RecursionError):
        return ""


def text_of(raw: msgspec.Raw) -> str:
    """Return raw JSON as text. Its syntax and encoding were checked when it was first read."""
    return bytes(raw).decode()


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a field is absent (the empty default) or null."""
    return bytes(raw) in (b"", b"null")


def compact(raw: msgspec.Raw) -> str:
    """JSON without whitespace between tokens; a missing value is an empty object."""
    return "{}" if is_null(raw) else msgspec.json.format(bytes(raw), indent=-1).decode()


class _AnyObject(msgspec.Struct):
    """All fields of the text are unknown here, so they are checked and skipped."""


_any_object = msgspec.json.Decoder(_AnyObject)


def check_object(text: str) -> None:
    """Raise msgspec.DecodeError, UnicodeEncodeError or RecursionError unless the text is a JSON object.

    Nothing is built, because 8 MB of small values would take half a second. The range of numbers is not checked.
    """
    _any_object.decode(text)

"""The JSON arguments of a complete tool call: parsed or checked, never repaired."""

from __future__ import annotations

import re

import msgspec

from tokenbus.errors import undecodable
from tokenbus.events.public import BlockComplete
from tokenbus.providers.request.json_object import check_object

LONG_ARGUMENTS = 64 * 1024
"""Characters from which arguments are not parsed for an event, if that can be avoided."""

_SHAPE = bytes(
    ord("0") if chr(code).isdecimal() else ord("e") if code in b"eE" else code for code in range(128)
) + bytes(128)
"""Maps each digit to 0, and E to e."""
_LONG_RUN, _LARGE_EXPONENT = b"0" * 200, b"e000"
"""A number with fewer digits and an exponent of two digits is below 1e308."""
NOT_PACKABLE = "a number exceeds 64 bits: read it from `arguments`"
"""Error text of `packable_arguments`."""
_MANY_DIGITS = re.compile(r"[0-9]{19}")
"""An integer beyond 64 bits has at least these."""


def parse_arguments(arguments: str) -> tuple[dict[str, object] | None, str | None]:
    """Parse arguments as a JSON object; return the object or an error text. Empty means no arguments; nothing is
    repaired.
    """
    if not arguments:
        return {}, None
    try:
        return msgspec.json.decode(arguments, type=dict[str, object]), None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeEncodeError) as e:
        return None, f"not a JSON object: {undecodable(e)}"


def arguments_object(block: BlockComplete) -> dict[str, object]:
    """A call's input for a reader that knows objects alone: free text is its ``input``, and arguments that are broken
    are its ``invalid_arguments``.
    """
    if block.free_text:
        return {"input": block.arguments or ""}
    if block.input is not None:
        return block.input
    parsed, _ = parse_arguments(block.arguments or "")
    return {"invalid_arguments": block.arguments} if parsed is None else parsed


def packable_arguments(arguments: str) -> tuple[dict[str, object] | None, str | None]:
    """Like `parse_arguments`, for an event that is encoded as msgpack: integers beyond 64 bits, which JSON allows and
    msgpack does not, are an error text. The call itself is not affected, because tools get the text.
    """
    parsed, problem = parse_arguments(arguments)
    if parsed and _MANY_DIGITS.search(arguments):
        try:
            msgspec.msgpack.encode(parsed)
        except OverflowError:
            return None, NOT_PACKABLE
    return parsed, problem


def check_arguments(arguments: str) -> tuple[msgspec.Raw | dict[str, object] | None, str | None]:
    """Like `parse_arguments`, but return long arguments as checked JSON on one line, without building the object: 8 MB
    of small values take half a second.

    Only for an event that is encoded as JSON.
    """
    if len(arguments) < LONG_ARGUMENTS:
        return parse_arguments(arguments)
    try:
        check_object(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as e:
        return None, f"not a JSON object: {undecodable(e)}"
    if _may_overflow(arguments):  # skipping a value does not check the range of numbers
        return parse_arguments(arguments)
    for blank in "\r\n\t":  # never inside a string
        arguments = arguments.replace(blank, "")
    return msgspec.Raw(arguments), None


def _may_overflow(arguments: str) -> bool:
    """Whether the text may contain a number beyond a double: an exponent of three digits, or 200 digits in a row."""
    shape = arguments.encode().translate(_SHAPE, b"+")
    return _LONG_RUN in shape or (b"e" in shape and _LARGE_EXPONENT in shape)

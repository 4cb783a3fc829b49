"""Rules for public blocks, shared by all their writers: the run, its policy gate, and the policies' own writer.

They cover the fields of a block's start and end (including cut and policy-changed blocks), which blocks are void, and
which finish reason fits the calls. Block numbers have no gap, and each writer counts its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from tokenbus.core.run.outbox import Outbox
from tokenbus.errors import undecodable
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, BlockKind, BlockStarted, ImageRef
from tokenbus.providers.response.json_decode import check_object

ToolCallHead = Literal["name", "id"]

CALL_CUT = "the call was cut off"
"""`input_error` of a call that was cut off; it never runs."""
_OF_OTHER_CONTENT: dict[str, Any] = {"signature": None, "opaque": None, "opaque_blobs": None, "audio": None}
"""Fields of `block_complete` that describe the model's own content; cleared if policies changed it."""


def call_heads(name: str | None, tool_id: str | None) -> Sequence[tuple[ToolCallHead, str]]:
    """First chunks of a tool call: its name, then its id."""
    return ("name", name or ""), ("id", tool_id or "")


def content_fields(
    kind: BlockKind,
    content: str,
    *,
    cut: bool = False,
    problem: str = "",
    as_json: bool = False,
    free_text: bool | None = None,
) -> dict[str, Any]:
    """Content fields of `block_complete`; none for an image. ``problem``: why a call is malformed. ``as_json``: the
    event is only encoded as JSON, so long arguments stay JSON (`check_arguments`). ``free_text``: the call's input
    is no JSON.
    """
    if kind == "image":
        return {}
    if kind != "tool_call":
        return {"content": content}
    problem = CALL_CUT if cut else problem
    read = check_arguments if as_json else packable_arguments
    parsed, misread = (None, problem or None) if problem or free_text else read(content)
    fields: dict[str, Any] = {"arguments": content, "input": parsed, "input_error": misread}
    return fields | {"free_text": True} if free_text else fields


def changed_fields(end: BlockComplete, kind: BlockKind, content: str) -> dict[str, Any]:
    """Fields of `block_complete` to replace because the published content is ``content``; empty if it is unchanged."""
    if kind == "image" or content == (end.arguments if kind == "tool_call" else end.content):
        return {}
    if kind == "tool_call" and end.cut:
        return {"arguments": content, "input": None, **_OF_OTHER_CONTENT}
    return {**content_fields(kind, content, free_text=end.free_text), **_OF_OTHER_CONTENT}


def first_void(numbers: Iterable[tuple[int, int]], drop_from: int, next_number: int) -> int:
    """First void block number after a writer's renumbering, given ``drop_from`` before it.

    ``numbers``: for each block its number before and after the writer.
    """
    return min((after for before, after in numbers if before >= drop_from), default=next_number)


def fitting_finish(finish: FinishReason, *, calls: bool) -> FinishReason:
    """The finish reason that fits: `tool_use` becomes `stop` without calls, and `stop` becomes `tool_use` with
    calls.
    """
    return ("tool_use" if calls else "stop") if finish in ("stop", "tool_use") else finish


def write_result(
    out: Outbox,
    turn: int,
    attempt: int,
    number: int,
    *,
    tool_id: str,
    tool_name: str,
    content: str,
    is_error: bool,
    blob_id: str | None = None,
    images: list[ImageRef] | None = None,
) -> None:
    """Write a tool result as a separate, complete block."""
    about = {"block": number, "kind": "tool_result", "tool_id": tool_id, "tool_name": tool_name}
    out.event(turn, attempt, BlockStarted, **about)
    if content:
        out.chunk(turn, attempt, number, "tool_result", content, tool_id=tool_id, tool_name=tool_name)
    out.event(
        turn,
        attempt,
        BlockComplete,
        **about,
        content=content,
        is_error=is_error or None,
        blob_id=blob_id,
        images=images or None,
    )


def write_item(out: Outbox, turn: int, attempt: int, number: int, *, item: str, json: str) -> None:
    """Write an item for the provider, which goes back to it at this place, as a separate, complete block."""
    about = {"block": number, "kind": "server_tool", "item": item}
    out.event(turn, attempt, BlockStarted, **about)
    out.chunk(turn, attempt, number, "server_tool", json)
    out.event(turn, attempt, BlockComplete, **about, content=json)


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

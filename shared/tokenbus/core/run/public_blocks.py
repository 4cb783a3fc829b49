"""The rules of a public block, for all who write one: the run, what its policies let out, and the policies' own writer.

What a block's beginning and its end say, also if it was cut or if policies changed it; from which number on blocks are
void; and the finish reason that fits the calls. Numbers have no gap, and each writer counts its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from tokenbus.core.run.outbox import Outbox
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, BlockKind, BlockStarted, ImageRef

ToolCallHead = Literal["name", "id"]

CALL_CUT = "the call was cut off"
"""The `input_error` of a call that broke off; it never runs."""
_OF_OTHER_CONTENT: dict[str, Any] = {"signature": None, "opaque": None, "opaque_blobs": None}
"""Fields of a block's end that speak of what the model wrote, and are left out if policies changed that."""


def parse_arguments(arguments: str) -> tuple[dict[str, object] | None, str | None]:
    """The arguments as an object, or what is wrong with them. Empty means no arguments; nothing is repaired."""
    if not arguments:
        return {}, None
    try:
        return msgspec.json.decode(arguments, type=dict[str, object]), None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeEncodeError) as e:
        return None, f"not a JSON object: {e}"


def call_heads(name: str | None, tool_id: str | None) -> Sequence[tuple[ToolCallHead, str]]:
    """The first chunks of a tool call: its name, then its id."""
    return ("name", name or ""), ("id", tool_id or "")


def content_fields(kind: BlockKind, content: str, *, cut: bool = False, problem: str = "") -> dict[str, Any]:
    """Fields of the end of a block with this content; an image's has none. ``problem``: what is wrong with a call."""
    if kind == "image":
        return {}
    if kind != "tool_call":
        return {"content": content}
    problem = CALL_CUT if cut else problem
    parsed, misread = (None, problem) if problem else parse_arguments(content)
    return {"arguments": content, "input": parsed, "input_error": misread}


def changed_fields(end: BlockComplete, kind: BlockKind, content: str) -> dict[str, Any]:
    """What is different at a block's end if ``content`` is what went out of it: nothing, if that is what it says."""
    if kind == "image" or content == (end.arguments if kind == "tool_call" else end.content):
        return {}
    if kind == "tool_call" and end.cut:
        return {"arguments": content, "input": None, **_OF_OTHER_CONTENT}
    return {**content_fields(kind, content), **_OF_OTHER_CONTENT}


def first_void(numbers: Iterable[tuple[int, int]], drop_from: int, next_number: int) -> int:
    """From which number on a writer's blocks are void, if those before it are void from ``drop_from`` on.

    ``numbers``: of each block its number before the writer, and after it."""
    return min((after for before, after in numbers if before >= drop_from), default=next_number)


def fitting_finish(finish: FinishReason, *, calls: bool) -> FinishReason:
    """The finish reason of a turn with these calls, or none: one that ends in no call just ends."""
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
    """A tool's result as a block of its own, from its beginning to its end."""
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

"""Rules for public blocks, shared by all their writers: the run, its policy gate, and the policies' own writer.

They cover the fields of a block's start and end (including cut and policy-changed blocks), which blocks are void, and
which finish reason fits the calls. Block numbers have no gap, and each writer counts its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tokenbus.core.run.blocks.tool_arguments import check_arguments, packable_arguments
from tokenbus.core.run.outbox import Outbox
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, BlockKind, BlockStarted, ImageRef

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

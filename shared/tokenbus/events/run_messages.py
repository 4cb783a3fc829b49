"""A run's output as messages for the next request of the same conversation. Pure.

Each turn gives the model's message, with its parts in the order of their blocks and the data that its provider wants
back; then the results of its calls. Content that was cut off is left out, except text, because the listener received
it. What a listener did not hear is not history: text ends where it was last heard, and what began later is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from tokenbus.events import requests
from tokenbus.events.public import BlockComplete, ImageRef

CARRIED = ("anthropic.container", "gemini-interactions.continuation_token")
"""Names of what a provider sends once for the whole answer and wants back with the next request: the id of the
container that its code ran in, or the token of an interaction that has to be continued.
"""
Extras = Sequence[Mapping[str, object]]


def messages_of(
    blocks: Sequence[BlockComplete], extras: Extras, participant: str | None, heard: Mapping[int, int] | None = None
) -> list[requests.Message]:
    """The messages of a run with these blocks. ``extras``: its `provider_extra`, with the data that came after the ends
    of blocks. ``heard``: see `RunResult.heard`.
    """
    late = {block: extra for extra in extras if isinstance(block := extra.get("block"), int)}
    if heard is not None:
        was = {block.block: block for block in blocks}
        blocks = [part for block in blocks if (part := _heard(block, heard))]
        late = {number: extra for number, extra in late.items() if any(was.get(number) is block for block in blocks)}
    messages: list[requests.Message] = []
    last = -1
    for turn in sorted({block.turn for block in blocks}):
        own = [block for block in blocks if block.turn == turn]
        parts = [part for block in own if (part := _part(block, late.get(block.block, {})))]
        if parts:
            messages.append(requests.Message(role="assistant", content=parts, participant=participant))
            last = len(messages) - 1
        called = {part.tool_id for part in parts if isinstance(part, requests.ToolCallPart)}
        results = [_result(block) for block in own if block.kind == "tool_result" and block.tool_id in called]
        if results:
            messages.append(requests.Message(role="tool", content=list[requests.ContentPart](results)))
    carried = {name: json for extra in extras if (name := extra.get("name")) in CARRIED and (json := extra.get("json"))}
    if carried and last >= 0:
        items: list[requests.ContentPart] = [
            requests.ExtraPart(name=str(name), json=str(json)) for name, json in carried.items()
        ]
        content = cast("list[requests.ContentPart]", messages[last].content)
        messages[last] = msgspec.structs.replace(messages[last], content=[*items, *content])
    return messages


def _heard(block: BlockComplete, heard: Mapping[int, int]) -> BlockComplete | None:
    """What the listener heard of a block. The data of a text that ends earlier are not the provider's any more."""
    if block.kind == "tool_result":
        return block  # it belongs to its call
    if block.block not in heard:
        return None
    content = block.content or ""
    if block.kind not in ("text", "audio") or heard[block.block] >= len(content):
        return block
    return msgspec.structs.replace(
        block,
        content=content[: heard[block.block]],
        signature=None,
        opaque=None,
        opaque_blobs=None,
        audio=None,
        cut=True,
    )


def _part(block: BlockComplete, late: Mapping[str, object]) -> requests.ContentPart | None:
    back: dict[str, Any] = {
        name: {**(getattr(block, name) or {}), **cast("dict[str, str]", late.get(name) or {})} or None
        for name in ("opaque", "opaque_blobs")
    }
    match block.kind:
        case "text" | "audio" if block.content:
            return requests.TextPart(text=block.content, **back)
        case "thinking" if not block.cut:
            return requests.ThinkingPart(text=block.content or "", signature=block.signature, **back)
        case "tool_call" if not block.cut:
            name, tool_id = block.tool_name or "", block.tool_id or ""
            free = bool(block.free_text)
            return requests.ToolCallPart(
                tool_id=tool_id, tool_name=name, arguments=block.arguments or "", free_text=free, **back
            )
        case "server_tool" if not block.cut and is_json(block.content or ""):
            return requests.ExtraPart(name=block.item or "", json=block.content or "")
        case "image" if block.image and not block.cut and not block.image.draft:
            source = _source(block.image)
            return requests.ImagePart(source=source, **back) if source else None
        case _:
            return None


def _result(block: BlockComplete) -> requests.ToolResultPart:
    """A result with those of its images that the model was shown."""
    shown = [image for image in block.images or () if image.size_bytes or image.base64]
    sources = [source for image in shown if (source := _source(image))]
    content: str | list[requests.TextPart | requests.ImagePart] = block.content or ""
    if sources:
        text = [requests.TextPart(text=block.content)] if block.content else []
        content = [*text, *(requests.ImagePart(source=source) for source in sources)]
    return requests.ToolResultPart(
        tool_id=block.tool_id or "", tool_name=block.tool_name, content=content, is_error=bool(block.is_error)
    )


def is_json(text: str) -> bool:
    """Whether a text is JSON: a policy may have changed it."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def _source(image: ImageRef) -> requests.BlobSource | requests.Base64Source | None:
    if image.blob_id:
        return requests.BlobSource(blob_id=image.blob_id, media_type=image.media_type, size_bytes=image.size_bytes)
    return requests.Base64Source(media_type=image.media_type, data=image.base64) if image.base64 else None

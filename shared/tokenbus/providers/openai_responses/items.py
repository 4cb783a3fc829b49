"""An item of the output between its announcement and its end, and what goes back of it beside its content."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.normalized import OpenKind
from tokenbus.providers.json_reading import is_null, read
from tokenbus.providers.openai_responses import wire

ItemKind = Literal["message", "reasoning", "call", "image", "other"]
"""`other`: what has no name here. It is told when it is complete, as it is."""

_KINDS: dict[str, ItemKind] = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "call",
    "custom_tool_call": "call",
    "image_generation_call": "image",
}
_SENT_BACK: dict[str, tuple[str, ...]] = {
    "message": ("phase",),
    "function_call": ("caller", "namespace", "async"),
    "custom_tool_call": ("type", "caller", "namespace", "async"),  # the type tells it from a function's call
}
"""Fields without a name here that the API takes back, by the type of the item; it refuses what it only says itself."""

_encode = msgspec.json.encode


class Part(msgspec.Struct):
    """A part of a message or of a reasoning: an open block."""

    ordinal: int
    citations: list[str] = []


class OpenItem(msgspec.Struct):
    """What is known of an item that has not ended."""

    type: str
    kind: ItemKind
    ordinal: int = -1
    """call, image, other: its place. reasoning: its first block. -1: it has none yet."""
    parts: dict[str, Part] = {}
    """message, reasoning: the open parts, by their kind and index."""
    seen: list[str] = []
    """message, reasoning: the parts that had content, open or closed."""
    blocks: list[int] = []
    """message, reasoning: the ordinals of its parts, open or closed."""
    streamed: bool = False
    """call: a delta brought arguments."""
    pieces: list[str] = []
    """call: arguments that came before its name."""
    held: int = 0
    """Bytes kept until the item's end."""


def kind_of(item: wire.Item, custom_tools: list[str] | None) -> ItemKind:
    """What an item is to us.

    A call of a custom tool that the request did not have is one that the provider runs itself (xAI's search does);
    ``custom_tools`` are those of the request, None where they are not known.
    """
    if item.type == "custom_tool_call" and custom_tools is not None and item.name not in custom_tools:
        return "other"
    return _KINDS.get(item.type, "other")


def tools_of(tools: msgspec.Raw) -> list[wire.NamedTool] | None:
    """The request's tools as the response repeats them; None where it does not."""
    try:
        return wire.named_tools.decode(tools)
    except msgspec.DecodeError:
        return None


def arguments_of(said: wire.Arguments) -> str:
    """A call's arguments as a string."""
    return _encode(said).decode() if isinstance(said, dict) else said or ""


def further_fields(kind: str, data: bytes) -> str:
    """The fields that go back with an item of this type and have no name here, as JSON; empty for none."""
    names = _SENT_BACK.get(kind)
    if not names:
        return ""
    said = read(wire.fields, data, "item")
    more = {name: said[name] for name in names if name in said and not is_null(said[name])}
    return _encode(more).decode() if more else ""


def texts_of(item: wire.Item) -> list[tuple[str, OpenKind, wire.ContentPart]]:
    """The parts of a complete item, each with its key and the kind of its block; text that stands there twice, once."""
    content = list(enumerate(item.content or ()))
    if item.type == "message":
        return [(text_key(i), "text", part) for i, part in content]
    summary = list(enumerate(item.summary or ()))
    summed_up = {part.text for _, part in summary}
    parts: list[tuple[str, OpenKind, wire.ContentPart]] = [(summary_key(i), "thinking", part) for i, part in summary]
    return parts + [(raw_key(i), "thinking", part) for i, part in content if part.text not in summed_up]


def text_key(index: int) -> str:
    """A part of a message."""
    return f"text {index}"


def summary_key(index: int) -> str:
    """A part of a reasoning's summary."""
    return f"summary {index}"


def raw_key(index: int) -> str:
    """A part of a reasoning in the model's own words."""
    return f"raw {index}"


def is_raw(key: str) -> bool:
    """Whether a part is in the model's own words."""
    return key.startswith("raw")

"""State of a Messages API content block between its start and stop, and the JSON of unknown block types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.events.run_messages import is_json
from tokenbus.providers.anthropic import wire
from tokenbus.providers.response.json_decode import is_null, read
from tokenbus.providers.response.repeats import EmittedText, not_emitted
from tokenbus.providers.response.surrogates import from_units, to_units

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class StreamedBlock(msgspec.Struct):
    """An open block, including data that can be emitted only at its stop."""

    kind: Literal["text", "thinking", "tool", "item"]
    ordinal: int = -1
    """-1 while a text block has no text."""
    whole: bool = False
    """It arrived complete inside a message; no stop event needs to follow."""
    tool_id: str = ""
    begun: str = ""
    """text, thinking: the text in the start event or message. Some providers repeat it in the first deltas."""
    again: str = ""
    """How much of that text the deltas have repeated so far."""
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    """text, thinking: everything emitted. tool: its input."""
    prefilled: str = ""
    """tool, item: the input in the start event; used only if no delta follows."""
    streamed: bool = False
    """tool: a delta brought input."""
    name: str = ""
    """item: its type."""
    item: str = ""
    """item: its initial JSON, if it has no input."""
    fields: dict[str, str] = {}
    """item: JSON of the fields that deltas added. text: data to emit with its first content."""
    pieces: list[str] = []
    """item: fragments of its input. text: its citations."""
    held: int = 0
    """Bytes buffered until the block's end."""

    def new_part(self, piece: str) -> str:
        """Return the new part of a delta. A delta that may repeat the initial text is held back until that is
        decided.
        """
        if not self.begun:
            return piece
        begun, parsed = to_units(self.begun), to_units(self.again + piece)
        if begun.startswith(parsed) and begun != parsed:
            self.again += piece
            return ""
        new = from_units(parsed[len(begun) :]) if parsed.startswith(begun) else self.again + piece
        self.begun = self.again = ""
        return new

    def rest_of_item(self) -> str | None:
        """The rest of the item's JSON; None if its input was cut off."""
        if not self.item:
            if not self.pieces:
                return f"{self.prefilled}}}"
            return "}" if is_json("".join(self.pieces)) else None
        if not self.fields:
            return self.item
        brought = {name: msgspec.Raw(value) for name, value in self.fields.items()}
        return msgspec.json.encode({**fields_of(self.item.encode()), **brought}).decode()


class EmittedBlock(msgspec.Struct, array_like=True):
    """Identifies a completed block, to match it with a repetition."""

    kind: Literal["text", "thinking", "tool", "item"]
    tool_id: str
    emitted: EmittedText


def remaining_of(whole: Sequence[wire.Block | wire.Unknown], emitted: Sequence[EmittedBlock]) -> list[str | None]:
    """For each block of a whole message, return the text not yet emitted; None if the whole block was emitted.

    Text and thinking are compared as the concatenation of all blocks of a kind. If that fails, and for other kinds,
    blocks are matched in order. Calls are also matched by id.
    """
    texts = [_text_of(block) for block in whole]
    left: list[str | None] = [*texts]
    for kind in ("text", "thinking", "tool", "item"):
        places = [at for at, block in enumerate(whole) if _kind_of(block) == kind]
        blocks = [block for block in emitted if block.kind == kind]
        if kind == "tool":
            ids = {block.tool_id for block in blocks if block.tool_id}
            known = [at for at in places if isinstance(block := whole[at], wire.ToolUseBlock) and block.id in ids]
            rests = dict.fromkeys(known or places[: len(blocks)])
        else:
            rests = dict.fromkeys(places[: len(blocks)])
            parts = [block.emitted for block in blocks if block.emitted]
            parsed = not_emitted(parts, [texts[at] for at in places]) if parts and kind != "item" else None
            if parsed is not None:
                rests |= {at: rest or None for at, rest in zip(places, parsed, strict=True) if rest or texts[at]}
        for at, rest in rests.items():
            left[at] = rest
    return left


def _kind_of(block: wire.Block | wire.Unknown) -> str:
    match block:
        case wire.TextBlock():
            return "text"
        case wire.ThinkingBlock() | wire.RedactedBlock():
            return "thinking"
        case wire.ToolUseBlock():
            return "tool"
        case wire.Unknown():
            return "item"


def _text_of(block: wire.Block | wire.Unknown) -> str:
    match block:
        case wire.TextBlock():
            return block.text or ""
        case wire.ThinkingBlock():
            return block.thinking or ""
        case _:
            return ""


def fields_of(data: bytes) -> dict[str, msgspec.Raw]:
    """The raw fields of a JSON object. Raises Malformed."""
    return read(_fields, data, "content block")


def opening_of(fields: dict[str, msgspec.Raw]) -> str:
    """The JSON of an item up to its input, which comes last because deltas may follow."""
    others = {name: value for name, value in fields.items() if name != "input"}
    return f'{msgspec.json.encode(others).decode()[:-1]},"input":'


def further_fields(data: bytes) -> str:
    """Unmapped fields of a tool_use block (its caller, say) as JSON; empty if there are none."""
    named = ("type", "id", "name", "input")
    fields = {name: value for name, value in fields_of(data).items() if name not in named and not is_null(value)}
    return msgspec.json.encode(fields).decode() if fields else ""

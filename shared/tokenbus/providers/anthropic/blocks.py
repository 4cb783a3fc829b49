"""A content block of the Messages API between its start and its stop, and its JSON where it has no name here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.providers.anthropic import wire
from tokenbus.providers.response.json_decode import is_json, is_null, read
from tokenbus.providers.response.repeats import Told, untold
from tokenbus.providers.response.surrogates import from_units, to_units

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class OpenBlock(msgspec.Struct):
    """What is known of it, and what can only be told at its stop."""

    kind: Literal["text", "thinking", "tool", "item"]
    ordinal: int = -1
    """-1 while a text block has no text."""
    whole: bool = False
    """It came complete inside of a message, and no stop needs to follow."""
    tool_id: str = ""
    begun: str = ""
    """text, thinking: what its start, or the message's, had already. Some say it once more in the first deltas."""
    again: str = ""
    """What deltas said once more of that, so far."""
    told: Told = msgspec.field(default_factory=Told)
    """text, thinking: all that was told of it. tool: its input."""
    prefilled: str = ""
    """tool: the input of its start, which holds only where no delta follows."""
    streamed: bool = False
    """tool: a delta brought input."""
    name: str = ""
    """item: its type."""
    item: str = ""
    """item: its JSON as it began."""
    fields: dict[str, str] = {}
    """item: the JSON of fields that deltas brought."""
    pieces: list[str] = []
    """item: fragments of its input. text: its citations."""
    held: int = 0
    """Bytes kept until the block's end."""

    def new_of(self, piece: str) -> str:
        """What is new of a delta. One that may repeat what the block began with waits until that is known."""
        if not self.begun:
            return piece
        begun, said = to_units(self.begun), to_units(self.again + piece)
        if begun.startswith(said) and begun != said:
            self.again += piece
            return ""
        new = from_units(said[len(begun) :]) if said.startswith(begun) else self.again + piece
        self.begun = self.again = ""
        return new

    @property
    def shown(self) -> int:
        """The ordinal under which a reader knows it as a block; -1 for none."""
        return -1 if self.kind == "item" else self.ordinal

    def completed(self) -> str:
        """An item with what its deltas brought. Input that is no JSON was cut: the item stays without it."""
        brought = {name: msgspec.Raw(value) for name, value in self.fields.items()}
        streamed = "".join(self.pieces)
        if streamed and is_json(streamed):
            brought["input"] = msgspec.Raw(streamed)
        if not brought:
            return self.item
        return msgspec.json.encode({**fields_of(self.item.encode()), **brought}).decode()


class ToldBlock(msgspec.Struct, array_like=True):
    """What tells a block that is complete from another."""

    kind: Literal["text", "thinking", "tool", "item"]
    tool_id: str
    told: Told


def left_of(whole: Sequence[wire.Block | wire.Unknown], told: Sequence[ToldBlock]) -> list[str | None]:
    """Of each block of a whole message its text, or what of it was not told; None: all of the block was.

    Text and thinking are told as far as all blocks of their kind say the same together; else, as all others, one by
    one in their order. A call is known by its id, too.
    """
    texts = [_text_of(block) for block in whole]
    left: list[str | None] = [*texts]
    for kind in ("text", "thinking", "tool", "item"):
        places = [at for at, block in enumerate(whole) if _kind_of(block) == kind]
        blocks = [block for block in told if block.kind == kind]
        if kind == "tool":
            ids = {block.tool_id for block in blocks if block.tool_id}
            known = [at for at in places if isinstance(block := whole[at], wire.ToolUseBlock) and block.id in ids]
            rests = dict.fromkeys(known or places[: len(blocks)])
        else:
            rests = dict.fromkeys(places[: len(blocks)])
            parts = [block.told for block in blocks if block.told]
            said = untold(parts, [texts[at] for at in places]) if parts and kind != "item" else None
            if said is not None:
                rests |= {at: rest or None for at, rest in zip(places, said, strict=True) if rest or texts[at]}
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
    """The fields of a JSON object as they are. Raises Malformed."""
    return read(_fields, data, "content block")


def further_fields(data: bytes) -> str:
    """The fields of a tool_use block that have no name here (its caller, say), as JSON; empty where there are none."""
    named = ("type", "id", "name", "input")
    fields = {name: value for name, value in fields_of(data).items() if name not in named and not is_null(value)}
    return msgspec.json.encode(fields).decode() if fields else ""

"""A content block of the Messages API between its start and its stop, and its JSON where it has no name here."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.providers.json_reading import is_json, is_null, read

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class OpenBlock(msgspec.Struct):
    """What is known of it, and what can only be told at its stop."""

    kind: Literal["text", "thinking", "tool", "item"]
    ordinal: int = -1
    """-1 while a text block has no text."""
    whole: bool = False
    """It came complete inside of a message, and no stop needs to follow."""
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


def fields_of(data: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object as they are. Raises Malformed."""
    return read(_fields, data, "content block")


def further_fields(data: bytes) -> str:
    """The fields of a tool_use block that have no name here (its caller, say), as JSON; empty where there are none."""
    named = ("type", "id", "name", "input")
    fields = {name: value for name, value in fields_of(data).items() if name not in named and not is_null(value)}
    return msgspec.json.encode(fields).decode() if fields else ""

"""An item of the output, and what goes back of it beside its content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.events.normalized import OpenKind
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.response.json_decode import is_null, read
from tokenbus.providers.response.repeats import Told, untold

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
_LOOKED_AT = 32
"""Of the parts that an end may belong to so many are looked at, the latest."""

_encode = msgspec.json.encode


class Part(msgspec.Struct):
    """A part of a message or of a reasoning: a block."""

    ordinal: int
    key: str
    """Its kind and index, as its first content had them."""
    told: Told = msgspec.field(default_factory=Told)
    citations: list[str] = []
    cited: bool = False
    """Citations came while it was open: it is told by its own events, and no end brings its text."""
    ended_as: str = ""
    """The key of the event that ended it; vendors count otherwise there."""


class Item(msgspec.Struct):
    """What is known of an item. Of one that ended only what tells it again from another."""

    type: str
    kind: ItemKind
    ids: list[str] = []
    """Its id, and a call's, as they were first."""
    call_id: str = ""
    name: str = ""
    """call: the tool's."""
    ended: bool = False
    again: bytes | None = None
    """The announcement that came once more after its end: of this item, or of another with the same id."""
    ordinal: int = -1
    """call, image, other: its place. reasoning: its first block. -1: it has none yet."""
    parts: list[Part] = []
    """message, reasoning: the parts that had content, in order of appearance."""
    open: dict[str, int] = {}
    """message, reasoning: those whose blocks are open, by key; they are until the item ends."""
    beside: dict[str, list[str]] = {}
    """reasoning: the pieces of a summary beside the model's own words, or the other way round; often the same text."""
    told: Told = msgspec.field(default_factory=Told)
    """call: its arguments."""
    pieces: list[str] = []
    """call: arguments that came before its name."""
    held: int = 0
    """Bytes kept until the item's end."""

    def open_part(self, key: str) -> Part | None:
        """The open part with this key."""
        return self.parts[self.open[key]] if key in self.open else None

    @property
    def sort(self) -> str:
        """Items of two sorts are never the same: what runs elsewhere and its result may have one id."""
        return sort_of(self.kind, self.type)

    def has(self, ids: Sequence[str], call_id: str | None) -> bool:
        """Whether it is known under one of these ids."""
        if call_id and self.call_id and call_id != self.call_id:
            return False
        return any(name in self.ids for name in ids)

    @property
    def says(self) -> bool:
        """Something was told of its content."""
        return bool(self.told) or any(part.told for part in self.parts)

    def may_be(self, said: wire.Item) -> bool:
        """Whether what was told of it is the beginning of this item."""
        if self.kind == "call":
            return said.name in (None, "", self.name) and self.told.rest(arguments_of(said)) is not None
        return untold([part.told for part in self.parts], [text for _, _, text, _ in texts_of(said)]) is not None

    def agrees(self, said: wire.Item) -> bool:
        """Whether nothing of what was told of it speaks against this item."""
        return self.kind in ("image", "other") or self.may_be(said) or (self.kind != "call" and not texts_of(said))

    def is_again(self, said: wire.Item) -> bool:
        """Whether what was told of it is all of this item, and something."""
        if self.kind == "call":
            return self.may_be(said) and self.told.rest(arguments_of(said)) == ""
        texts = [text for _, _, text, _ in texts_of(said)]
        return self.says and untold([part.told for part in self.parts], texts) == [""] * len(texts)

    def part_ended(self, key: str, whole: str) -> Part | None:
        """The part that ends under this key: that which had it, or else one that says the same."""
        latest = self.parts[-_LOOKED_AT:]
        for part in latest:
            if part.ended_as == key or (part.key == key and not part.ended_as):
                return part
        others = [part for part in latest if part.told and not part.ended_as]
        for part in others:
            if part.told.rest(whole) == "":
                return part
        return others[0] if len(self.parts) == 1 and others and others[0].told.rest(whole) is not None else None

    def left_of(self, whole: Sequence[tuple[str, str]]) -> list[str]:
        """What was not told of these texts, which have their keys at the item's end.

        They are told already as far as they are what the parts say together, however divided. Failing that, a part
        is the one of the same text, or else of the same key, or else of the same place in their order; and what was
        told of it stands.
        """
        cited = {part.key for part in self.parts if part.cited and not part.told}
        texts = ["" if key in cited else text for key, text in whole]
        parts = [part for part in self.parts if part.told]
        for ordered in (sorted(parts, key=lambda part: place_of(part.key)), parts):
            rests = untold([part.told for part in ordered], texts)
            if rests is not None:
                return rests
        said = Counter((part.told.units, part.told.crc) for part in parts)
        left: list[int] = []
        for at, text in enumerate(texts):
            mark = _mark(text)
            if said[mark]:
                said[mark] -= 1
            else:
                left.append(at)
        others: list[str] = []
        for part in parts:
            if said[part.told.units, part.told.crc]:
                said[part.told.units, part.told.crc] -= 1
                others.append(part.key)
        keys = Counter(others)
        unmatched: list[int] = []
        for at in left:
            if keys[whole[at][0]]:
                keys[whole[at][0]] -= 1
            else:
                unmatched.append(at)
        new = set(unmatched[keys.total() :])
        return [text if at in new else "" for at, text in enumerate(texts)]


def _mark(text: str) -> tuple[int, int]:
    told = Told()
    told.add(text)
    return told.units, told.crc


def kind_of(item: wire.Item, custom_tools: list[str] | None) -> ItemKind:
    """What an item is to us.

    A call of a custom tool that the request did not have is one that the provider runs itself (xAI's search does);
    ``custom_tools`` are those of the request, None where they are not known.
    """
    if item.type == "custom_tool_call" and custom_tools is not None and item.name not in custom_tools:
        return "other"
    return _KINDS.get(item.type, "other")


def sort_of(kind: ItemKind, item_type: str) -> str:
    """What must be the same of two items that are one."""
    return item_type if kind == "other" else kind


def ids_of(item: wire.Item) -> list[str]:
    """The ids under which something may be said of an item."""
    return [name for name in (item.call_id, item.id) if name]


def tools_of(tools: msgspec.Raw) -> list[wire.NamedTool] | None:
    """The request's tools as the response repeats them; None where it does not."""
    try:
        return wire.named_tools.decode(tools)
    except msgspec.DecodeError:
        return None


def arguments_of(said: wire.Item | wire.ArgumentsDone | wire.InputDone) -> str:
    """A call's arguments as a string; a custom tool's input."""
    if isinstance(said, wire.InputDone) or (isinstance(said, wire.Item) and said.type == "custom_tool_call"):
        return said.input or ""
    return _encode(said.arguments).decode() if isinstance(said.arguments, dict) else said.arguments or ""


def further_fields(kind: str, data: bytes) -> str:
    """The fields that go back with an item of this type and have no name here, as JSON; empty for none."""
    names = _SENT_BACK.get(kind)
    if not names:
        return ""
    said = read(wire.fields, data, "item")
    more = {name: said[name] for name in names if name in said and not is_null(said[name])}
    return _encode(more).decode() if more else ""


def texts_of(item: wire.Item) -> list[tuple[str, OpenKind, str, wire.ContentPart]]:
    """The parts of a complete item that have text, each with its key, the kind of its block and that text; of a
    reasoning, text that stands there twice, once."""
    content = list(enumerate(item.content or ()))
    if item.type == "message":
        said = [(text_key(i), part.refusal or part.text or "", part) for i, part in content]
        return [(key, "text", text, part) for key, text, part in said if text]
    summary = [(summary_key(i), part) for i, part in enumerate(item.summary or ())]
    summed_up = {part.text for _, part in summary}
    raw = [(raw_key(i), part) for i, part in content if part.text not in summed_up]
    return [(key, "thinking", part.text, part) for key, part in [*summary, *raw] if part.text]


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


def place_of(key: str) -> int:
    """Its index among its kind."""
    return int(key.rpartition(" ")[2])

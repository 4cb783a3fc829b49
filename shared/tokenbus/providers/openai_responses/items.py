"""An output item, and the data beyond its content that is sent back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.events.normalized import OpenKind
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS
from tokenbus.providers.response.json_decode import is_null, read
from tokenbus.providers.response.repeats import EmittedText, not_emitted

ItemKind = Literal["message", "reasoning", "call", "image", "other"]
"""`other`: unknown types. These are emitted verbatim when complete."""

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
    "custom_tool_call": ("caller", "namespace", "async"),
}
"""Unmapped fields that the API accepts back, by item type. It rejects its output-only fields."""
_MAX_COMPARED = 32
"""How many of the latest parts to check when matching the end of a part."""

_encode = msgspec.json.encode


def phase_of(item: wire.Item) -> str:
    """What a message is, as its provider says."""
    if item.phase is wire.NOTHING or is_null(item.phase):
        return ""
    try:
        return msgspec.json.decode(item.phase, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


class StreamedPart(msgspec.Struct):
    """A part of a message or of a reasoning item: one block."""

    ordinal: int
    key: str
    """Kind and index, taken from its first content."""
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    citations: list[str] = []
    ended_as: dict[str, str] = {}
    """The key in each type of event that ended it; some vendors number differently in one of them."""


class StreamedItem(msgspec.Struct):
    """The state of an item. For an ended item, only what identifies it."""

    type: str
    kind: ItemKind
    ids: list[str] = []
    """The first ids seen: the item's, and the call's."""
    call_id: str = ""
    name: str = ""
    """call: the tool's name."""
    phase: str = ""
    """message: what it is, as the provider says."""
    ended: bool = False
    again: bytes | None = None
    """A repeated announcement after its end: of this item, or of another with the same id."""
    ordinal: int = -1
    """call, image, other: its ordinal. reasoning: its first block's. -1: none yet."""
    parts: list[StreamedPart] = []
    """message, reasoning: parts with content, in order of appearance."""
    open: dict[str, int] = {}
    """message, reasoning: open blocks by key; they stay open until the item ends."""
    beside: dict[str, list[str]] = {}
    """reasoning: pieces of the summary while raw reasoning was emitted first, or vice versa; often the same text."""
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    """call: its arguments emitted so far. other: the text of its streamed field."""
    field: str = ""
    """other: its streamed field; a dot: the field of an object in it, or the place in a list."""
    pieces: list[str] = []
    """call: arguments that came before its name."""
    has_logprobs: bool = False
    """message: its deltas brought log probabilities."""
    held: int = 0
    """Bytes buffered until the item's end."""

    def rest_of(self, data: bytes) -> str:
        """The JSON of a complete item, after what was streamed of it."""
        if not self.field:
            return data.decode()
        after, whole = list[str](), msgspec.Raw(data)
        for name in self.field.split("."):
            others: dict[str, msgspec.Raw] | list[msgspec.Raw]
            if name.isdigit():
                values = read(wire.raws, bytes(whole), "item")
                whole, *others = values[int(name) :] or [msgspec.Raw(b"null")]
            else:
                others = read(wire.fields, bytes(whole), "item")
                whole = others.pop(name, msgspec.Raw(b"null"))
            after.append(("," if others else "") + _encode(others).decode()[1:])
        rest = _encode(self.emitted.rest(text_in(whole)) or "").decode()[1:-1] + '"'
        return rest + "".join(reversed(after))

    def open_part(self, key: str) -> StreamedPart | None:
        return self.parts[self.open[key]] if key in self.open else None

    @property
    def sort(self) -> str:
        """Items of different sorts are never the same: a server-side call and its result may share an id."""
        return sort_of(self.kind, self.type)

    def has(self, ids: Sequence[str], call_id: str | None) -> bool:
        """Whether the item is known by one of these ids."""
        if self.kind == "call" and call_id and self.call_id and call_id != self.call_id:
            return False
        return any(name in self.ids for name in ids)

    @property
    def has_content(self) -> bool:
        """Whether any of its content was emitted."""
        return bool(self.emitted) or any(part.emitted for part in self.parts)

    def could_be(self, parsed: wire.Item) -> bool:
        """Whether the emitted content is a prefix of this item."""
        if self.kind == "call":
            return parsed.name in (None, "", self.name) and self.emitted.rest(arguments_of(parsed)) is not None
        return (
            not_emitted([part.emitted for part in self.parts], [text for _, _, text, _ in texts_of(parsed)]) is not None
        )

    def agrees(self, parsed: wire.Item) -> bool:
        """Whether the emitted content does not contradict this item."""
        return (
            self.kind in ("image", "other") or self.could_be(parsed) or (self.kind != "call" and not texts_of(parsed))
        )

    def is_repeat(self, parsed: wire.Item) -> bool:
        """Whether the emitted content equals this item and is not empty."""
        if self.kind == "call":
            return self.could_be(parsed) and self.emitted.rest(arguments_of(parsed)) == ""
        texts = [text for _, _, text, _ in texts_of(parsed)]
        return self.has_content and not_emitted([part.emitted for part in self.parts], texts) == [""] * len(texts)

    def part_ended(self, event: str, key: str, whole: str) -> StreamedPart | None:
        """Return the part that ends under this key in this type of event: the one with the key, else one with equal
        text.
        """
        latest = self.parts[-_MAX_COMPARED:]
        if again := next((part for part in latest if part.ended_as.get(event) == key), None):
            return again
        others = [part for part in latest if part.emitted and event not in part.ended_as]
        own = next((part for part in others if part.key == key), None)
        if own and own.emitted.rest(whole) is not None:
            return own
        if equal := next((part for part in others if part.emitted.rest(whole) == ""), None):
            return equal
        return own or (others[0] if len(self.parts) == 1 and others and others[0].emitted.rest(whole) else None)

    def remaining_of(self, whole: Sequence[tuple[str, str]]) -> list[str]:
        """Return the part of each final text that was not emitted yet.

        ``whole`` has the texts with their keys at the item's end. Texts are first compared as one concatenation,
        however divided. If that fails, parts are matched by equal text, else by key, else by order, and emitted text
        stays.
        """
        texts = [text for _, text in whole]
        parts = [part for part in self.parts if part.emitted]
        for ordered in (sorted(parts, key=lambda part: place_of(part.key)), parts):
            rests = not_emitted([part.emitted for part in ordered], texts)
            if rests is not None:
                return rests
        parsed = Counter((part.emitted.units, part.emitted.crc) for part in parts)
        left: list[int] = []
        for at, text in enumerate(texts):
            mark = _mark(text)
            if parsed[mark]:
                parsed[mark] -= 1
            else:
                left.append(at)
        others: list[str] = []
        for part in parts:
            if parsed[part.emitted.units, part.emitted.crc]:
                parsed[part.emitted.units, part.emitted.crc] -= 1
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
    emitted = EmittedText()
    emitted.add(text)
    return emitted.units, emitted.crc


def kind_of(item: wire.Item, custom_tools: list[str] | None) -> ItemKind:
    """Classify an item.

    A custom tool call whose tool is not in the request is run by the provider itself (xAI's search). ``custom_tools``:
    the request's custom tools; None if unknown.
    """
    if item.type == "custom_tool_call" and custom_tools is not None and item.name not in custom_tools:
        return "other"
    return _KINDS.get(item.type, "other")


def tool_of(item: wire.Item) -> str:
    """The tool that the provider runs; empty if the item is not a tool's."""
    tool, of_tool, _ = item.type.partition("_call")
    return item.name or (tool if of_tool else "")


def text_in(raw: msgspec.Raw) -> str:
    """The string that a field holds; empty if it is none."""
    value = read(wire.anything, bytes(raw), "item")
    return value if isinstance(value, str) else ""


def is_next(field: str, other: str) -> bool:
    """Whether another field is the next text of the same list."""
    head, _, place = field.rpartition(".")
    return place.isdigit() and other == f"{head}.{int(place) + 1}"


def sort_of(kind: ItemKind, item_type: str) -> str:
    """The value that must be equal for two events to concern the same item."""
    return item_type if kind == "other" else kind


def ids_of(item: wire.Item) -> list[str]:
    """The ids by which events may refer to an item."""
    return [name for name in (item.call_id, item.id) if name]


def tools_of(tools: msgspec.Raw) -> list[wire.NamedTool] | None:
    """The request's tools as repeated in the response; None if it does not repeat them."""
    try:
        return wire.named_tools.decode(tools)
    except (msgspec.DecodeError, RecursionError):
        return None


def arguments_of(parsed: wire.Item | wire.ArgumentsDone | wire.InputDone) -> str:
    """A call's arguments, or a custom tool's input, as a string."""
    if isinstance(parsed, wire.InputDone) or (isinstance(parsed, wire.Item) and parsed.type == "custom_tool_call"):
        return parsed.input or ""
    return _encode(parsed.arguments).decode() if isinstance(parsed.arguments, dict) else parsed.arguments or ""


def further_fields(kind: str, data: bytes) -> str:
    """Unmapped fields to send back with an item of this type, as JSON; empty if none."""
    names = _SENT_BACK.get(kind)
    if not names:
        return ""
    parsed = read(wire.fields, data, "item")
    more = {name: parsed[name] for name in names if name in parsed and not is_null(parsed[name])}
    return _encode(more).decode() if more else ""


def texts_of(item: wire.Item) -> list[tuple[str, OpenKind, str, wire.ContentPart]]:
    """The parts of a complete item that have text: key, block kind, text and part.

    In a reasoning item, text that appears in both summary and content is returned once.
    """
    content = list(enumerate(item.content or ()))
    if item.type == "message":
        parsed = [(text_key(i), part.refusal or part.text or "", part) for i, part in content]
        return [(key, "text", text, part) for key, text, part in parsed if text]
    summary = [(summary_key(i), part) for i, part in enumerate(item.summary or ())]
    summed_up = {part.text for _, part in summary}
    raw = [(raw_key(i), part) for i, part in content if part.text not in summed_up]
    return [(key, "thinking", part.text, part) for key, part in [*summary, *raw] if part.text]


def text_key(index: int) -> str:
    """Key of a part of a message."""
    return f"text {index}"


def summary_key(index: int) -> str:
    """Key of a part of a reasoning summary."""
    return f"summary {index}"


def raw_key(index: int) -> str:
    """Key of a part of raw reasoning."""
    return f"raw {index}"


def is_raw(key: str) -> bool:
    """Whether a part is raw reasoning."""
    return key.startswith("raw")


def place_of(key: str) -> int:
    """The part's index among its kind."""
    return int(key.rpartition(" ")[2])


_MAX_CANDIDATES = 16
"""How many candidates to compare when matching items by text."""


class ItemTable(msgspec.Struct):
    """The items of one response in order of appearance, including those that have ended.

    An event's item is found by id, else by position, else by equal content. Real streams change an item's ids from
    event to event (GitHub Copilot), omit `output_index` and the item's id (llama.cpp), renumber items at their end, or
    give two items the same id or position. So none of these is trusted on its own.
    """

    items: list[StreamedItem] = []
    by_id: dict[str, int] = {}
    """The latest item with an id, keyed with and without its sort."""
    by_index: dict[int, int] = {}
    """The latest item at a position."""
    latest: dict[str, int] = {}
    """The latest item of a kind."""
    open: dict[int, None] = {}
    """Items that have not ended."""

    def add(self, item: StreamedItem, index: int | None, ids: list[str]) -> int:
        """Add an item. Raises TooLarge if too many are open."""
        if len(self.open) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.open) + 1, MAX_OPEN_BLOCKS, unit="blocks")
        at = len(self.items)
        self.items.append(item)
        self.open[at] = None
        self.latest[item.sort] = at
        item.ids = ids
        if index is not None:
            self.by_index[index] = at
        for name in ids:
            self.by_id[f"{item.sort} {name}"] = self.by_id[name] = at
        return at

    def end(self, at: int) -> None:
        """Mark an item as complete."""
        self.items[at].ended = True
        del self.open[at]

    def find(self, sort: str, index: int | None, ids: Sequence[str], call_id: str | None = None) -> int | None:
        """Find the item of this sort by id, or else by position; None if there is none.

        A different ``call_id`` means a different call, even with the same item id.
        """
        there = None if index is None else self.by_index.get(index)
        if there is not None and self.items[there].sort != sort:
            there = None
        if there is not None and self.items[there].has(ids, call_id):
            return there
        known = (self.by_id.get(f"{sort} {name}") for name in ids)
        return next((at for at in known if at is not None and self.items[at].has(ids, call_id)), there)

    def of_delta(self, kind: ItemKind, index: int | None, item_id: str | None) -> int | None:
        """Find the item that a piece belongs to. Without id and position, it is the latest open item of the kind."""
        at = self.find(kind, index, [item_id] if item_id else [])
        if at is None and index is None and item_id not in self.by_id:
            at = self.latest.get(kind)
            return at if at is None or not self.items[at].ended else None
        return at

    def of_item(self, kind: ItemKind, index: int | None, parsed: wire.Item) -> int | None:
        """Find the item that this final form belongs to. An ended item found only by position must also agree in
        content.
        """
        at = self.find(sort_of(kind, parsed.type), index, ids_of(parsed), parsed.call_id)
        if at is not None:
            item = self.items[at]
            if not item.ended or item.has(ids_of(parsed), parsed.call_id) or _matches_position(item, parsed):
                return at
        if kind == "other" and index is None and not ids_of(parsed):
            at = self.latest.get(sort_of(kind, parsed.type))
            return at if at in self.open else None
        return self._by_text(kind, parsed)

    def of_whole(self, kinds: Sequence[ItemKind], parsed: Sequence[wire.Item]) -> list[int | None]:
        """Match each item of a final response to a known one, at most once each. None: it was never streamed."""
        found: list[int | None] = []
        others: dict[ItemKind, dict[int, None]] = {}
        for at, item in enumerate(self.items):
            others.setdefault(item.kind, {})[at] = None
        for index, (kind, item) in enumerate(zip(kinds, parsed, strict=True)):
            at = self.find(sort_of(kind, item.type), index, ids_of(item), item.call_id)
            left = others.get(kind, {})
            if at in left and not self.items[at].has(ids_of(item), item.call_id):
                at = at if _matches_position(self.items[at], item) else None
            at = at if at in left else None
            found.append(at)
            if at is not None:
                del left[at]
        for match in (StreamedItem.is_repeat, _has_same_type):
            for index, (kind, item) in enumerate(zip(kinds, parsed, strict=True)):
                left = others.get(kind, {})
                looked_at = islice(left, _MAX_CANDIDATES) if found[index] is None else ()
                if (at := next((at for at in looked_at if match(self.items[at], item)), None)) is not None:
                    found[index] = at
                    del left[at]
        return found

    def _by_text(self, kind: ItemKind, parsed: wire.Item) -> int | None:
        """Find the open item with equal content, or the only one whose content so far is a prefix."""
        anonymous = bool(parsed.name) and not ids_of(parsed)
        of_kind = (at for at in self.open if (item := self.items[at]).kind == kind and (item.has_content or anonymous))
        alike = [at for at in islice(of_kind, _MAX_CANDIDATES) if self.items[at].could_be(parsed)]
        again = next((at for at in alike if self.items[at].is_repeat(parsed)), None)
        return alike[0] if again is None and (len(alike) == 1 or (alike and kind == "call")) else again


def _matches_position(item: StreamedItem, parsed: wire.Item) -> bool:
    """Whether the item at this position can be this one. Different ids may mean different items."""
    return not (item.ids and ids_of(parsed)) or item.agrees(parsed)


def _has_same_type(item: StreamedItem, parsed: wire.Item) -> bool:
    return item.type == parsed.type

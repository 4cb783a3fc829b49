"""Finds the item that an event refers to: by id, else by position, else by equal content.

Real streams change an item's ids from event to event (GitHub Copilot), omit `output_index` and the item's id
(llama.cpp), renumber items at their end, or give two items the same id or position. So none of these is trusted on its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import ItemKind, StreamedItem, ids_of, sort_of
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS

_MAX_COMPARED = 16
"""How many candidates to compare when matching items by text."""


class ItemTable(msgspec.Struct):
    """The items of one response in order of appearance, including those that have ended."""

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
                looked_at = islice(left, _MAX_COMPARED) if found[index] is None else ()
                if (at := next((at for at in looked_at if match(self.items[at], item)), None)) is not None:
                    found[index] = at
                    del left[at]
        return found

    def _by_text(self, kind: ItemKind, parsed: wire.Item) -> int | None:
        """Find the open item with equal content, or the only one whose content so far is a prefix."""
        anonymous = bool(parsed.name) and not ids_of(parsed)
        of_kind = (at for at in self.open if (item := self.items[at]).kind == kind and (item.has_content or anonymous))
        alike = [at for at in islice(of_kind, _MAX_COMPARED) if self.items[at].could_be(parsed)]
        again = next((at for at in alike if self.items[at].is_repeat(parsed)), None)
        return alike[0] if again is None and (len(alike) == 1 or (alike and kind == "call")) else again


def _matches_position(item: StreamedItem, parsed: wire.Item) -> bool:
    """Whether the item at this position can be this one. Different ids may mean different items."""
    return not (item.ids and ids_of(parsed)) or item.agrees(parsed)


def _has_same_type(item: StreamedItem, parsed: wire.Item) -> bool:
    return item.type == parsed.type

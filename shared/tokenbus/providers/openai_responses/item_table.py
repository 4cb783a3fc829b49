"""Which item an event is about: the one of its id, or else of its position, or else the one that says the same.

Real streams change an item's ids from event to event (GitHub Copilot), leave `output_index` out and an item's id, too
(llama.cpp), count anew at an item's end, give two items one id, or one position. So neither is believed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import Item, ItemKind, ids_of, sort_of
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS

_LOOKED_AT = 16
"""Of the items that one may be by its text so many are looked at."""


class ItemTable(msgspec.Struct):
    """The items of one response, in order of appearance, those that have ended, too."""

    items: list[Item] = []
    by_id: dict[str, int] = {}
    """The latest item with an id, of its sort and of any."""
    by_index: dict[int, int] = {}
    """The latest item at a position."""
    latest: dict[str, int] = {}
    """The latest item of a kind."""
    open: dict[int, None] = {}
    """Those that have not ended."""

    def add(self, item: Item, index: int | None, ids: list[str]) -> int:
        """A new item. Raises TooLarge where too many are open."""
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
        """This item is complete."""
        self.items[at].ended = True
        del self.open[at]

    def find(self, sort: str, index: int | None, ids: Sequence[str], call_id: str | None = None) -> int | None:
        """The item of this sort that has one of these ids, or else this position; None: no item is known to.

        A call with another ``call_id`` is another call, whatever its id.
        """
        there = None if index is None else self.by_index.get(index)
        if there is not None and self.items[there].sort != sort:
            there = None
        if there is not None and self.items[there].has(ids, call_id):
            return there
        known = (self.by_id.get(f"{sort} {name}") for name in ids)
        return next((at for at in known if at is not None and self.items[at].has(ids, call_id)), there)

    def of_delta(self, kind: ItemKind, index: int | None, item_id: str | None) -> int | None:
        """The item that a piece belongs to; one that says neither id nor position, to the latest that is open."""
        at = self.find(kind, index, [item_id] if item_id else [])
        if at is None and index is None and item_id not in self.by_id:
            at = self.latest.get(kind)
            return at if at is None or not self.items[at].ended else None
        return at

    def of_item(self, kind: ItemKind, index: int | None, said: wire.Item) -> int | None:
        """The item that this is at its end. One that is known by its position alone, and has ended, must agree."""
        at = self.find(sort_of(kind, said.type), index, ids_of(said), said.call_id)
        if at is not None:
            item = self.items[at]
            if not item.ended or item.has(ids_of(said), said.call_id) or _may_be_there(item, said):
                return at
        return self._by_text(kind, said)

    def of_whole(self, kinds: Sequence[ItemKind], said: Sequence[wire.Item]) -> list[int | None]:
        """Of each item of a response at its end, which it is; each is only one. None: it was never told."""
        found: list[int | None] = []
        others: dict[ItemKind, dict[int, None]] = {}
        for at, item in enumerate(self.items):
            others.setdefault(item.kind, {})[at] = None
        for index, (kind, item) in enumerate(zip(kinds, said, strict=True)):
            at = self.find(sort_of(kind, item.type), index, ids_of(item), item.call_id)
            left = others.get(kind, {})
            if at in left and not self.items[at].has(ids_of(item), item.call_id):
                at = at if _may_be_there(self.items[at], item) else None
            at = at if at in left else None
            found.append(at)
            if at is not None:
                del left[at]
        for match in (Item.is_again, _is_like):
            for index, (kind, item) in enumerate(zip(kinds, said, strict=True)):
                left = others.get(kind, {})
                looked_at = islice(left, _LOOKED_AT) if found[index] is None else ()
                if (at := next((at for at in looked_at if match(self.items[at], item)), None)) is not None:
                    found[index] = at
                    del left[at]
        return found

    def _by_text(self, kind: ItemKind, said: wire.Item) -> int | None:
        """The open item that says what this one says; or as far as it came, if no other may be it."""
        anonymous = bool(said.name) and not ids_of(said)
        of_kind = (at for at in self.open if (item := self.items[at]).kind == kind and (item.says or anonymous))
        alike = [at for at in islice(of_kind, _LOOKED_AT) if self.items[at].may_be(said)]
        again = next((at for at in alike if self.items[at].is_again(said)), None)
        return alike[0] if again is None and (len(alike) == 1 or (alike and kind == "call")) else again


def _may_be_there(item: Item, said: wire.Item) -> bool:
    """Whether the item at this position is this one: ids that differ may be two items."""
    return not (item.ids and ids_of(said)) or item.agrees(said)


def _is_like(item: Item, said: wire.Item) -> bool:
    return item.type == said.type

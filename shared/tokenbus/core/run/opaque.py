"""Opaque data of blocks: what a provider wants back with them, as public events hand it on.

It is told with the end of its block (`block_complete`), without the signature, which has a field of its own. A provider
may send some of it later; that is told with the run's end, as entries of `provider_extra` that name their block. Large
values lie in the blob store, and events name the blobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.events.normalized import Opaque

if TYPE_CHECKING:
    from tokenbus.core.run.state import RunState

MAX_INLINE_CHARS = 256 * 1024
"""Of one value in a public event. Only a value that the blob store did not take is ever that large."""


def check_size(kept: Mapping[str, str], new: Opaque, number: int, limit: int) -> None:
    """Raises TooLarge where a block would have more than ``limit`` characters of it."""
    size = len(new.value) + sum(len(value) for name, value in kept.items() if name != new.name)
    if size > limit:
        raise TooLarge(f"block {number}, what goes back with it", size, limit)


class HandedOn(msgspec.Struct):
    """Opaque data of one block as an event tells it."""

    opaque: dict[str, str] = {}
    opaque_blobs: dict[str, str] = {}
    too_large: list[str] = []
    """Names of values that neither an event nor the blob store takes."""

    def add(self, name: str, value: str, blob_id: str) -> None:
        """One value; a newer one of the same name takes its place."""
        self.opaque.pop(name, None)
        self.opaque_blobs.pop(name, None)
        if blob_id:
            self.opaque_blobs[name] = blob_id
        elif len(value) <= MAX_INLINE_CHARS:
            self.opaque[name] = value
        elif name not in self.too_large:
            self.too_large.append(name)

    @property
    def notes(self) -> list[dict[str, object]]:
        """What is missing, for a `provider_extra`."""
        return [{"note": f"{name!r} is too large to be handed on without a blob store"} for name in self.too_large]

    @property
    def fields(self) -> dict[str, dict[str, str]]:
        """The fields of an event, empty ones left out."""
        fields = {"opaque": self.opaque, "opaque_blobs": self.opaque_blobs}
        return {name: value for name, value in fields.items() if value}


def keep(s: RunState, data: Opaque) -> None:
    """Keep it with its block; where that has ended, for the run's end. Raises TooLarge."""
    ended = s.blocks.keep(data)
    if ended is not None:
        late = s.late.setdefault(ended, HandedOn(dict(s.blocks.origin)))
        late.add(data.name, data.value, data.blob_id)


def drop_void(s: RunState, drop_from: int) -> None:
    """Blocks of the turn from this number on are void, and so is what was to go back with them or after them."""
    s.late = {number: late for number, late in s.late.items() if number < drop_from}
    first_void = -1 if drop_from <= s.first_block else drop_from - 1
    s.extras = [
        _unplaced(extra) if extra.get("turn") == s.turn and _after(extra) >= first_void else extra for extra in s.extras
    ]


def extras_of(s: RunState) -> list[dict[str, object]]:
    """The run's `provider_extra`."""
    late: list[dict[str, object]] = []
    for number, handed in sorted(s.late.items()):
        late.append({"block": number, **handed.fields})
        late += handed.notes
    return [*s.extras, *late]


def without_places(extras: list[dict[str, object]] | None) -> list[dict[str, object]] | None:
    """The same for a run whose blocks others number or change: nothing in it goes back to the provider."""
    return [_unplaced(extra) for extra in extras if "block" not in extra] or None if extras else extras


def _after(extra: Mapping[str, object]) -> int:
    after = extra.get("after")
    return after if isinstance(after, int) else -1


def _unplaced(extra: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in extra.items() if name not in ("turn", "after")}

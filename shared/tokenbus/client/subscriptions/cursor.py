"""A subscriber's position in a topic, as a value that can be stored and resumed from."""

from __future__ import annotations

import re
from typing import Self

import msgspec

from tokenbus.bus.keys import TOPICS, SubscribedTopic
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.errors import Malformed

OLDEST = "-"
"""Replaces an entry id: the position before the oldest entry that is kept at read time."""
NOTHING_YET = "0-0"
"""The position in a partition that had no entries yet."""
_POSITION = re.compile(r"-|\d{1,20}-\d{1,20}")
_LAST_SEQ = 2**64 - 1


def just_before(entry_id: str) -> str:
    """Return the greatest id below this one: https://redis.io/docs/latest/develop/data-types/streams/#entry-ids."""
    ms, seq = id_key(entry_id)
    return f"{ms}-{seq - 1}" if seq else f"{max(0, ms - 1)}-{_LAST_SEQ if ms else 0}"


class Cursor(msgspec.Struct, frozen=True):
    """The last entry received from each partition of a topic. `parse` reads what ``str`` writes."""

    topic: SubscribedTopic
    positions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.topic}:{','.join(self.positions)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a cursor written by ``str``. Raises Malformed."""
        topic, _, positions = text.partition(":")
        found = tuple(positions.split(","))
        if topic not in TOPICS or not _are_positions(found):
            raise Malformed("cursor", f"{text[:80]!r} was not made by a subscription")
        return cls(topic, found)

    def check(self) -> None:
        """Check the positions. Raises ValueError if no subscription can have made this cursor."""
        if not _are_positions(self.positions):
            raise ValueError(f"from_: the cursor has positions that are not entry ids: {str(self)[:80]!r}")


def _are_positions(positions: tuple[str, ...]) -> bool:
    return all(_POSITION.fullmatch(p) for p in positions)

"""Where a subscriber stands in a topic, as a value that can be kept and taken up again."""

from __future__ import annotations

import re
from typing import Self

import msgspec

from tokenbus.bus.keys import TOPICS, SubscribedTopic
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.errors import Malformed

OLDEST = "-"
"""In place of an entry id: before the oldest entry that is kept, whichever that is by then."""
_POSITION = re.compile(r"-|\d{1,20}-\d{1,20}")
_LAST_SEQ = 2**64 - 1


def just_before(entry_id: str) -> str:
    """The greatest id below this one: https://redis.io/docs/latest/develop/data-types/streams/#entry-ids."""
    ms, seq = id_key(entry_id)
    return f"{ms}-{seq - 1}" if seq else f"{max(0, ms - 1)}-{_LAST_SEQ if ms else 0}"


class Cursor(msgspec.Struct, frozen=True):
    """For each partition of a topic the entry that was had last. `parse` reads what ``str`` writes."""

    topic: SubscribedTopic
    positions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.topic}:{','.join(self.positions)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor that ``str`` wrote. Raises Malformed."""
        topic, _, positions = text.partition(":")
        found = tuple(positions.split(","))
        if topic not in TOPICS or not _are_positions(found):
            raise Malformed("cursor", f"{text[:80]!r} was not made by a subscription")
        return cls(topic, found)

    def check(self) -> None:
        """Raises ValueError if this is no cursor that a subscription made."""
        if not _are_positions(self.positions):
            raise ValueError(f"from_: the cursor has positions that are no entry ids: {str(self)[:80]!r}")


def _are_positions(positions: tuple[str, ...]) -> bool:
    return all(_POSITION.fullmatch(p) for p in positions)

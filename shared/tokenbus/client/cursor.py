"""Where a subscriber stands in a topic, as a value that can be kept and taken up again."""

from __future__ import annotations

import re
from typing import Self

import msgspec

from tokenbus.bus.keys import TOPICS, SubscribedTopic
from tokenbus.errors import Malformed

OLDEST = "-"
"""In place of an entry id: before the oldest entry that is kept, whichever that is by then."""
_POSITION = re.compile(r"-|\d{1,20}-\d{1,20}")


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
        if topic not in TOPICS or not all(_POSITION.fullmatch(p) for p in found):
            raise Malformed("cursor", f"{text[:80]!r} was not made by a subscription")
        return cls(topic, found)

"""A subscriber's position in a topic, as a value that can be stored; how a subscription is iterated; what it could not
deliver.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from tokenbus.bus.keys import TOPICS, SubscribedTopic
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.errors import CursorTrimmed, Malformed

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


log = logging.getLogger(__name__)

OnTrimmed = Callable[[CursorTrimmed], None]
"""Called once for each partition whose unread entries were trimmed; the subscription then continues at the oldest entry
that is kept. Its exceptions propagate to the reader.
"""


def log_trimmed(error: CursorTrimmed) -> None:
    """Log the gap and continue; the default of `each`."""
    log.warning("events were trimmed before they were read: %s", error)


class Gaps:
    """Counts and reports the gaps of one subscription."""

    def __init__(self, on_trimmed: OnTrimmed | None) -> None:
        """``on_trimmed``: None to raise `CursorTrimmed`."""
        self.trimmed = 0
        """How often unread entries were trimmed, counted per partition."""
        self.malformed = 0
        """How many entries were skipped because they are not events."""
        self._on_trimmed = on_trimmed

    def log_by_default(self) -> None:
        """Log trimmed events unless the caller set a handler: inside `each` no caller can catch the error."""
        self._on_trimmed = self._on_trimmed or log_trimmed

    def was_trimmed(self, error: CursorTrimmed) -> None:
        """Count and report a gap. Raises ``error`` if there is no handler, and whatever the handler raises."""
        self.trimmed += 1
        if self._on_trimmed is None:
            raise error
        self._on_trimmed(error)

    def was_malformed(self, error: Malformed) -> None:
        """Count and log the entry. Logs ever less often, so that a broken writer does not flood the log."""
        self.malformed += 1
        if self.malformed.bit_count() == 1:
            log.warning("entry passed over (%d so far): %s", self.malformed, error)


T = TypeVar("T")


async def until_stopped(take: Callable[[], Awaitable[T]]) -> AsyncGenerator[T]:
    """Yield everything that ``take`` returns."""
    while True:
        try:
            item = await take()
        except StopAsyncIteration:
            return
        yield item


class EnteredOrIterated(ABC, Generic[T]):
    """Starts when it is entered or first iterated. Without ``async with``, the end of the iteration closes it."""

    _entered = False

    async def __aenter__(self) -> Self:
        self._entered = True
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._last_is_done()
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[T]:
        return self if self._entered else self._until_left()

    @abstractmethod
    async def __anext__(self) -> T: ...

    @abstractmethod
    async def aclose(self) -> None:
        """End the iteration."""

    @abstractmethod
    async def _start(self) -> None:
        """Begin, if it is entered."""

    def _last_is_done(self) -> None:
        """Acknowledge the item that was taken last, if that is still to be done."""

    async def _until_left(self) -> AsyncGenerator[T]:
        """Yield everything, and close it however the iteration ends."""
        try:
            async with aclosing(until_stopped(self.__anext__)) as items:
                async for item in items:
                    yield item
        finally:
            await self.aclose()

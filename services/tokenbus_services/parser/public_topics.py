"""Which public topics an event goes to, besides its run's log."""

from __future__ import annotations

from collections.abc import Collection

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, ImagePreview, PublicEvent, ToolProgress


class PublicTopics:
    """The streams of one partition's public topics."""

    def __init__(self, partition: int, keys: Keys, topics: Collection[PublicTopic]) -> None:
        """``topics``: which of visible, chunks and blocks are written; `runs` always is."""
        streams: dict[PublicTopic, str] = {t: keys.topic(partition, t) for t in topics}
        self._visible = [s for t, s in streams.items() if t in ("visible", "chunks")]
        self._hidden = [s for t, s in streams.items() if t == "chunks"]
        self._blocks = [s for t, s in streams.items() if t == "blocks"]
        self._lifecycle = [keys.topic(partition, "runs")]

    def of(self, event: PublicEvent) -> list[str]:
        """The streams for this event."""
        match event:
            case Chunk():
                return self._visible if event.visible else self._hidden
            case BlockStarted() | ImagePreview() | BlockComplete() | ToolProgress():
                return self._blocks
            case _:
                return self._lifecycle

"""Decides which events of a topic a subscriber wants. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.client.decode import TopicEvent
from tokenbus.core.nearest_name import unknown_name
from tokenbus.events.decisions import Decided
from tokenbus.events.public import (
    BlockEvent,
    BlockKind,
    BlockTopicEvent,
    Chunk,
    ChunkTopicEvent,
    RunTopicEvent,
    ToolProgress,
    UnknownEvent,
)

Runs: TypeAlias = Collection[str] | Callable[[str], bool]
"""Run ids (a set may change while in use), or a predicate on run ids."""

_BlockTopicKind = Literal["block_start", "image_preview", "block_progress", "block_complete", "tool_progress"]
_RunKind = Literal[
    "started", "answering", "retrying", "restarted", "usage", "completed", "incomplete", "failed", "cancelled"
]
Kind: TypeAlias = Literal["chunk", "decision"] | _BlockTopicKind | _RunKind | BlockKind
"""The name of an event type or of a block kind."""
K = TypeVar("K", bound=TopicEvent)
Classes: TypeAlias = type[K] | Collection[type[K]]
Kinds: TypeAlias = Kind | type[K] | Collection[Kind | type[K]] | None
"""Event types and block kinds by name, or event classes."""


def _tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


def _tags(union: object) -> frozenset[str]:
    return frozenset(_tag(kind) for kind in get_args(union) if kind is not UnknownEvent)


_EVENT_KINDS: dict[SubscribedTopic, frozenset[str]] = {
    "visible": _tags(ChunkTopicEvent),
    "chunks": _tags(ChunkTopicEvent),
    "blocks": _tags(BlockTopicEvent),
    "runs": _tags(RunTopicEvent),
    "decisions": frozenset([_tag(Decided)]),
}
_BLOCK_KINDS: frozenset[str] = frozenset(get_args(BlockKind))


class Selection:
    """A filter on the events of one topic.

    ``kinds`` names event types (``block_complete``, ``failed``, or their classes), block kinds (``text``,
    ``tool_call``), or both; an event of a block must then match both. None: all events.
    """

    def __init__(self, topic: SubscribedTopic, kinds: Kinds[Any] = None, runs: Runs | None = None) -> None:
        """Raises ValueError for a kind that this topic never carries; such a subscription would stay silent forever."""
        events = _EVENT_KINDS[topic]
        blocks = _BLOCK_KINDS if topic in ("visible", "chunks", "blocks") else frozenset[str]()
        named = _names(kinds)
        for kind in sorted(named - events - blocks):
            raise ValueError(f"kinds of {topic}: {unknown_name(kind, [*sorted(events), *sorted(blocks)])}")
        self._blocks = named & blocks or blocks
        if kinds is None or named & events:
            self._events = named & events or events
        else:
            self._events = events - {_tag(ToolProgress)} if named else frozenset[str]()
        self._unknown = kinds is None
        self._wants_run = _one_of([runs] if isinstance(runs, str) else runs) if runs is not None else None

    def wants(self, event: TopicEvent) -> bool:
        """Whether the subscriber wants this event. Raises whatever the predicate on runs raises."""
        if isinstance(event, UnknownEvent):
            if not self._unknown:
                return False
        elif _tag(event) not in self._events or (
            isinstance(event, Chunk | BlockEvent) and event.kind not in self._blocks
        ):
            return False
        return self._wants_run is None or self._wants_run(event.run)


def _names(kinds: Kinds[Any]) -> frozenset[str]:
    if kinds is None:
        return frozenset()
    each = [kinds] if isinstance(kinds, str | type) else cast("Collection[object]", kinds)
    return frozenset(
        _tag(kind) if isinstance(kind, type) and hasattr(kind, "__struct_config__") else str(kind) for kind in each
    )


def _one_of(runs: Runs) -> Callable[[str], bool]:
    return runs if callable(runs) else lambda run: run in runs

"""Which events of a topic a subscriber wants: pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias, get_args

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.client.entries import TopicEvent
from tokenbus.events.decisions import Decided
from tokenbus.events.public import BlockEvent, BlockKind, Chunk, PublicEvent

Runs: TypeAlias = Collection[str] | Callable[[str], bool]
"""Run ids (a set may change while it is in use), or what says of a run id whether it is wanted."""

EVENT_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(PublicEvent))
BLOCK_KINDS: frozenset[str] = frozenset(get_args(BlockKind))


class Selection:
    """Says of each event whether it is wanted.

    ``kinds`` names types of events (``block_complete``, ``failed``), kinds of blocks (``text``, ``tool_call``), or
    both: then an event of a block must be of one of either. None: all.
    """

    def __init__(self, kinds: Collection[str] | None = None, runs: Runs | None = None) -> None:
        """Raises ValueError for a kind that there is not."""
        named = frozenset([kinds] if isinstance(kinds, str) else kinds or ())
        if unknown := named - EVENT_KINDS - BLOCK_KINDS:
            raise ValueError(f"kinds: {sorted(unknown)} are neither types of events nor kinds of blocks")
        self._blocks = named & BLOCK_KINDS or BLOCK_KINDS
        if kinds is None or named & EVENT_KINDS:
            self._events = named & EVENT_KINDS or EVENT_KINDS
        else:
            self._events = _OF_BLOCKS if named else frozenset[str]()
        self._named = kinds is not None
        self._wants_run = _one_of([runs] if isinstance(runs, str) else runs) if runs is not None else None

    def of(self, topic: SubscribedTopic) -> Selection:
        """This, for a topic. Raises ValueError for kinds of a topic whose events have none."""
        if topic == "decisions" and self._named:
            raise ValueError("kinds: decisions have none; their action says what they are")
        return self

    def wants(self, event: TopicEvent) -> bool:
        """Whether the subscriber is to have it. Raises what the predicate on runs raises."""
        if isinstance(event, Decided):
            return self._wants_run is None or self._wants_run(event.run)
        if event.__struct_config__.tag not in self._events:
            return False
        if isinstance(event, Chunk | BlockEvent) and event.kind not in self._blocks:
            return False
        return self._wants_run is None or self._wants_run(event.run)


_OF_BLOCKS = frozenset(str(kind.__struct_config__.tag) for kind in (Chunk, *get_args(BlockEvent)))


def _one_of(runs: Runs) -> Callable[[str], bool]:
    return runs if callable(runs) else lambda run: run in runs

"""Outgoing public events: adjacent chunks are joined, then events are numbered.

Events stay here as drafts without a number until the commit. Adjacent chunks of one block become one chunk; nothing is
joined across a block boundary or another event. A draft is numbered only when it leaves, so that ``seq`` has no gap.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.events.public import BlockKind, Chunk, PublicEvent, ToolCallPart

JOIN_LIMIT = 16 * 1024
"""Maximum characters of a joined chunk, so that a subscriber never has to buffer more at once."""


class _ChunkDraft(msgspec.Struct):
    turn: int
    attempt: int
    block: int
    kind: BlockKind
    part: ToolCallPart | None
    tool_id: str | None
    tool_name: str | None
    visible: bool
    pieces: list[str]
    size: int


class _EventDraft(msgspec.Struct):
    turn: int
    attempt: int
    event: type[PublicEvent]
    fields: dict[str, Any]


class Outbox:
    """Drafts of one run since its last commit."""

    def __init__(self, *, visible: bool = True, only_json: bool = False) -> None:
        """``visible``: whether chunks may be visible; False overrides each chunk's own flag. ``only_json``: the events
        are only encoded as JSON, so values that are JSON already may be `msgspec.Raw`.
        """
        self.only_json = only_json
        self._visible = visible
        self._drafts: list[_ChunkDraft | _EventDraft] = []

    def __len__(self) -> int:
        return len(self._drafts)

    def chunk(
        self,
        turn: int,
        attempt: int,
        block: int,
        kind: BlockKind,
        text: str,
        *,
        visible: bool = False,
        part: ToolCallPart | None = None,
        tool_id: str | None = None,
        tool_name: str | None = None,
    ) -> None:
        """Add a piece of a block's content; joined to the last chunk if that is of the same block and part."""
        last = self._drafts[-1] if self._drafts else None
        if (
            isinstance(last, _ChunkDraft)
            and last.block == block
            and last.part == part
            and last.size + len(text) <= JOIN_LIMIT
        ):
            last.pieces.append(text)
            last.size += len(text)
            return
        self._drafts.append(
            _ChunkDraft(
                turn, attempt, block, kind, part, tool_id, tool_name, visible and self._visible, [text], len(text)
            )
        )

    def event(self, turn: int, attempt: int, event: type[PublicEvent], **fields: Any) -> None:
        """Add any other public event with its own fields."""
        self._drafts.append(_EventDraft(turn, attempt, event, fields))

    def number(self, run: str, seq: int) -> list[PublicEvent]:
        """Return the events in order, numbered from ``seq``, and empty the outbox."""
        drafts, self._drafts = self._drafts, []
        return [self._finish(run, n, draft) for n, draft in enumerate(drafts, seq)]

    def clear(self) -> None:
        """Drop the drafts."""
        self._drafts = []

    @staticmethod
    def _finish(run: str, seq: int, draft: _ChunkDraft | _EventDraft) -> PublicEvent:
        if isinstance(draft, _EventDraft):
            return draft.event(run=run, seq=seq, turn=draft.turn, attempt=draft.attempt, **draft.fields)
        return Chunk(
            run=run,
            seq=seq,
            turn=draft.turn,
            attempt=draft.attempt,
            block=draft.block,
            kind=draft.kind,
            text="".join(draft.pieces),
            visible=draft.visible,
            depth=0,
            tool_call_part=draft.part,
            tool_id=draft.tool_id,
            tool_name=draft.tool_name,
        )

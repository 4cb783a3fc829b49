"""Outgoing public events of a run.

Events stay here as drafts without a number until the commit. Adjacent chunks of one block become one (`chunk_joining`).
A draft is numbered only when it leaves, so that ``seq`` has no gap.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.events.child_runs import depth_of
from tokenbus.events.public import TERMINAL, BlockKind, Chunk, PublicEvent, TerminalEvent, ToolCallPart

COMMENTARY = "commentary"
_ENVELOPE = ("run", "seq", "turn", "attempt", "session")


def fields_of(event: PublicEvent) -> dict[str, Any]:
    """The event's own fields."""
    return {name: getattr(event, name) for name in event.__struct_fields__ if name not in _ENVELOPE}


class _EventDraft(msgspec.Struct):
    turn: int
    attempt: int
    event: type[PublicEvent]
    fields: dict[str, Any]

    def number(self, run: str, session: str | None, seq: int) -> PublicEvent:
        return self.event(run=run, session=session, seq=seq, turn=self.turn, attempt=self.attempt, **self.fields)


class Outbox:
    """Drafts of one run since its last commit."""

    def __init__(
        self,
        *,
        visible: bool = True,
        commentary: bool = True,
        session: str | None = None,
        only_json: bool = False,
    ) -> None:
        """``visible``: whether chunks may be visible; False overrides each chunk's own flag. ``commentary``: whether
        those of commentary may be. ``only_json``: the events are only encoded as JSON, so values that are JSON already
        may be `msgspec.Raw`.
        """
        self._commentary = commentary
        self.only_json = only_json
        self._visible = visible
        self._session = session
        self._drafts: list[JoinedChunk | _EventDraft] = []

    def shows(self, phase: str | None) -> bool:
        """Whether a text of this phase may be visible."""
        return self._commentary or phase != COMMENTARY

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
        if isinstance(last, JoinedChunk) and last.join(block, part, text):
            return
        self._drafts.append(
            JoinedChunk(
                turn, attempt, block, kind, part, tool_id, tool_name, visible and self._visible, [text], len(text)
            )
        )

    def event(self, turn: int, attempt: int, event: type[PublicEvent], **fields: Any) -> None:
        """Add any other public event with its own fields."""
        self._drafts.append(_EventDraft(turn, attempt, event, fields))

    def put_back(self, event: PublicEvent) -> None:
        """Add an event that `take_end` returned."""
        self.event(event.turn, event.attempt, type(event), **fields_of(event))

    def take_end(self, run: str) -> TerminalEvent | None:
        """Remove the terminal event, if there is one, and return it without a number."""
        last = self._drafts[-1].number(run, self._session, 0) if self._drafts else None
        if not isinstance(last, TERMINAL):
            return None
        self._drafts.pop()
        return last

    def number(self, run: str, seq: int) -> list[PublicEvent]:
        """Return the events in order, numbered from ``seq``, and empty the outbox."""
        drafts, self._drafts = self._drafts, []
        return [draft.number(run, self._session, n) for n, draft in enumerate(drafts, seq)]

    def clear(self) -> None:
        """Drop the drafts."""
        self._drafts = []


# Nothing is joined across a block boundary or another event. The joined chunks concatenate to the same content.


JOIN_LIMIT = 16 * 1024
"""Maximum characters of a joined chunk, so that a subscriber never has to buffer more at once."""


class JoinedChunk(msgspec.Struct):
    """A chunk that grows until it is numbered."""

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

    def join(self, block: int, part: ToolCallPart | None, text: str) -> bool:
        """Append ``text`` if it is of the same block and part, and within the limit. Return whether it was."""
        if self.block != block or self.part != part or self.size + len(text) > JOIN_LIMIT:
            return False
        self.pieces.append(text)
        self.size += len(text)
        return True

    def number(self, run: str, session: str | None, seq: int) -> Chunk:
        """Return the public event."""
        return Chunk(
            run=run,
            session=session,
            seq=seq,
            turn=self.turn,
            attempt=self.attempt,
            block=self.block,
            kind=self.kind,
            text="".join(self.pieces),
            visible=self.visible,
            depth=depth_of(run),
            tool_call_part=self.part,
            tool_id=self.tool_id,
            tool_name=self.tool_name,
        )

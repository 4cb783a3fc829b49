"""Joins adjacent chunks of one block into one. Pure.

Nothing is joined across a block boundary or another event. The joined chunks concatenate to the same content.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.public import BlockKind, Chunk, ToolCallPart

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

    def number(self, run: str, seq: int) -> Chunk:
        """Return the public event."""
        return Chunk(
            run=run,
            seq=seq,
            turn=self.turn,
            attempt=self.attempt,
            block=self.block,
            kind=self.kind,
            text="".join(self.pieces),
            visible=self.visible,
            depth=0,
            tool_call_part=self.part,
            tool_id=self.tool_id,
            tool_name=self.tool_name,
        )

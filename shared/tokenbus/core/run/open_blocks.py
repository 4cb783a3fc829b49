"""Which blocks of a run are open, as its own log tells: for a run whose state nobody can read."""

from __future__ import annotations

import msgspec

from tokenbus.core.run.blocks import OpenBlock
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, decode


class OpenBlocks:
    """Give it a log's events in their order with `read`."""

    def __init__(self) -> None:
        self.by_number: dict[int, OpenBlock] = {}

    def read(self, event: bytes) -> None:
        """One event. What is none, or is of a kind that this version does not know, says nothing of blocks."""
        try:
            said = decode(event)
        except msgspec.MsgspecError:
            return
        match said:
            case BlockStarted():
                block = OpenBlock(said.block, said.kind, tool_id=said.tool_id, tool_name=said.tool_name)
                self.by_number[said.block] = block
            case Chunk() if said.tool_call_part in (None, "input") and said.block in self.by_number:
                self.by_number[said.block].pieces.append(said.text)
            case BlockComplete():
                self.by_number.pop(said.block, None)
            case _:
                pass

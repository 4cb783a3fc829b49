"""Open blocks of a run, read from its log; used if the run's state is unreadable."""

from __future__ import annotations

import msgspec

from tokenbus.core.run.blocks import OpenBlock
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, decode


class OpenBlocks:
    """Collects open blocks. Pass a log's events to `read` in order."""

    def __init__(self) -> None:
        self.by_number: dict[int, OpenBlock] = {}

    def read(self, event: bytes) -> None:
        """Process one event. Undecodable events and unknown kinds are ignored."""
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

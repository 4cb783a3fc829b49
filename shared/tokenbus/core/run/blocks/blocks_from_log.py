"""Open blocks of a run, read from its log; used if the run's state is unreadable."""

from __future__ import annotations

import msgspec

from tokenbus.core.run.blocks.block_table import OpenBlock
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, decode


class OpenBlocks:
    """Collects open blocks. Pass a log's events to `read` in order."""

    def __init__(self) -> None:
        self.by_number: dict[int, OpenBlock] = {}

    def read(self, event: bytes) -> None:
        """Process one event. Undecodable events and unknown kinds are ignored."""
        try:
            found = decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        match found:
            case BlockStarted():
                block = OpenBlock(
                    found.block,
                    found.kind,
                    tool_id=found.tool_id,
                    tool_name=found.tool_name,
                )
                self.by_number[found.block] = block
            case Chunk() if found.tool_call_part in (None, "input") and found.block in self.by_number:
                self.by_number[found.block].pieces.append(found.text)
            case BlockComplete():
                self.by_number.pop(found.block, None)
            case _:
                pass

"""Folds the changes of chunks into the state that a policy sees. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tokenbus.policy.stream_format import (
    BlockBegan,
    BlockEnded,
    BlockGrew,
    BlocksVoided,
    CallNamed,
    Change,
    StreamFinished,
)
from tokenbus.policy.stream_state import (
    ContentStreamBlock,
    OtherStreamBlock,
    ServerToolStreamBlock,
    StreamBlock,
    StreamState,
    ToolCallStreamBlock,
)


class BlockAssembler:
    """The state of one stream, updated in place: a policy that keeps a reference sees the updates."""

    def __init__(self) -> None:
        self.state = StreamState()
        self._blocks: dict[int, StreamBlock] = {}

    def apply(self, changes: Iterable[Change], block: int | None = None) -> None:
        """Apply the changes of one chunk, which is part of ``block``."""
        self.state.just_completed = self.state.just_cut = None
        for change in changes:
            self._apply(change)
        self.state.chunk_block = None if block is None else self._blocks[block]

    def _apply(self, change: Change) -> None:
        state = self.state
        match change:
            case BlockBegan():
                state.current_block = self._blocks[change.number] = block = _block(change)
                state.blocks.append(block)
            case BlockGrew():
                state.current_block = block = self._blocks[change.number]
                block.grow(change.text)
            case CallNamed():
                block = self._blocks[change.number]
                assert isinstance(block, ToolCallStreamBlock)
                block.id, block.name = change.id, change.name
            case BlockEnded():
                state.current_block = block = self._blocks[change.number]
                if change.cut:
                    state.just_cut = block
                else:
                    block.is_complete = True
                    state.just_completed = block
            case BlocksVoided():
                state.blocks[:] = [block for block in state.blocks if block.number < change.since]
                self._blocks = {block.number: block for block in state.blocks}
                if state.current_block not in state.blocks:
                    state.current_block = None
            case StreamFinished():
                state.finish_reason = change.reason


def _block(began: BlockBegan) -> StreamBlock:
    match began.kind:
        case "text":
            return ContentStreamBlock(began.id or f"content_{began.number}", began.number)
        case "tool_call":
            return ToolCallStreamBlock(began.id, began.number, index=began.index, name=began.name)
        case "server_tool":
            return ServerToolStreamBlock(began.id or f"server_tool_{began.number}", began.number, name=began.name)
        case kind:
            return OtherStreamBlock(began.id or f"{kind}_{began.number}", began.number, other_kind=kind)

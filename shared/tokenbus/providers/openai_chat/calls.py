"""Which call a piece of a tool call belongs to, and when the call has begun.

By its `index`, where it has one. Real streams leave the index out or null (Mistral), leave the id empty after the
first piece (Alibaba), bring the name late, repeat it, or number all parallel calls 0 (Gemini's chat endpoint).
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.providers.decoding import MAX_OPEN_BLOCKS
from tokenbus.providers.openai_chat.wire import CallDelta


class Call(msgspec.Struct):
    """A tool call on its way. It begins, and has an ordinal, once its name is known."""

    ordinal: int = -1
    tool_id: str = ""
    """The provider's; empty while it has none."""
    name: str = ""
    pieces: list[str] = []
    """Fragments of its arguments that came before its name."""
    extra_content: str = ""


class CallTable(msgspec.Struct):
    """The calls of one response, in order of appearance."""

    calls: list[Call] = []
    by_index: dict[int, int] = {}

    def find(self, delta: CallDelta, name: str) -> Call:
        """The call of this piece, a new one if need be. Raises TooLarge where there are too many."""
        tool_id = delta.id or ""
        at = self._position(delta.index, tool_id, name)
        if at is None:
            at = len(self.calls)
            if at >= MAX_OPEN_BLOCKS:
                raise TooLarge("open blocks", at + 1, MAX_OPEN_BLOCKS)
            self.calls.append(Call())
        if delta.index is not None:
            self.by_index[delta.index] = at
        call = self.calls[at]
        call.tool_id = call.tool_id or tool_id
        call.name = call.name or name
        return call

    def _position(self, index: int | None, tool_id: str, name: str) -> int | None:
        if index is not None:
            at = self.by_index.get(index)
            if at is None:
                return None
            known = self.calls[at].tool_id
            # Another id together with a name is another call, whatever its number says.
            return None if name and tool_id and known and tool_id != known else at
        if tool_id:
            return next((at for at, call in enumerate(self.calls) if call.tool_id == tool_id), None)
        return None if name or not self.calls else len(self.calls) - 1

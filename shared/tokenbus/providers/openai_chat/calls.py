"""Assigns pieces of tool calls to their calls, and detects when a call's arguments are complete.

A piece is matched by its `index`, if it has one. Real streams omit the index or send null (Mistral), leave the id empty
after the first piece (Alibaba), send the name late or repeatedly, number all parallel calls 0 (Gemini's chat endpoint),
or repeat a call once it is complete (MiniMax).
"""

from __future__ import annotations

import re

import msgspec

from tokenbus.errors import TooLarge
from tokenbus.providers.openai_chat.wire import CallDelta
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS
from tokenbus.providers.response.repeats import EmittedText

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class ObjectEnd(msgspec.Struct):
    """Detects when streamed JSON closes its outermost object. Does not validate the JSON."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    closed: bool = False

    def feed(self, text: str) -> None:
        """Process the next piece."""
        at = 1 if self.escaped and text else 0
        self.escaped = self.escaped and not text
        while found := (_IN_STRING if self.in_string else _OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case "\\":
                    at += 1
                    self.escaped = at > len(text)
                case '"':
                    self.in_string = not self.in_string
                case "{" | "[":
                    self.depth += 1
                case _:
                    self.depth -= 1
                    self.closed = self.closed or (self.depth == 0 and found[0] == "}")


class ReceivedCall(msgspec.Struct):
    """A tool call being received. It starts, and gets its ordinal, once its name is known."""

    ordinal: int = -1
    tool_id: str = ""
    """The provider's id; empty until known."""
    name: str = ""
    pieces: list[str] = []
    """Argument fragments that came before the name."""
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    """Its arguments emitted so far."""
    end: ObjectEnd = msgspec.field(default_factory=ObjectEnd)
    done: bool = False
    """The call is complete and later content has begun."""
    extra_content: str = ""
    free_text: bool = False
    """Its arguments are no JSON, so only the answer's end says that they are complete."""

    def new_part(self, arguments: str) -> str:
        """Return the new part of this piece: empty if complete arguments are repeated."""
        if self.free_text:
            self.emitted.add(arguments)
            return arguments
        if self.end.closed and self.emitted.rest(arguments) == "":
            return ""
        self.emitted.add(arguments)
        self.end.feed(arguments)
        return arguments


class CallTable(msgspec.Struct):
    """The calls of one response, in order of appearance."""

    calls: list[ReceivedCall] = []
    by_index: dict[int, int] = {}
    listed: bool = False
    """Whether calls arrived in `tool_calls`. Then a `function_call` repeats one of them."""

    def find(self, delta: CallDelta, name: str) -> ReceivedCall:
        """Return the call of this piece, adding it if it is new. Raises TooLarge if there are too many."""
        tool_id = delta.id or ""
        at = self._position(delta.index, tool_id, name)
        if at is None:
            at = self._add()
        if delta.index is not None:
            self.by_index[delta.index] = at
        return self._known(at, tool_id, name)

    def find_whole(self, place: int, delta: CallDelta, name: str) -> ReceivedCall:
        """Return the call at this position of the final message, matched by id or else by position. Raises TooLarge."""
        tool_id = delta.id or ""
        at = next((at for at, call in enumerate(self.calls) if tool_id and call.tool_id == tool_id), None)
        if at is None and place < len(self.calls) and self.calls[place].name in ("", name):
            at = place
        return self._known(self._add() if at is None else at, tool_id, name)

    def _add(self) -> int:
        if len(self.calls) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.calls) + 1, MAX_OPEN_BLOCKS, unit="blocks")
        self.calls.append(ReceivedCall())
        return len(self.calls) - 1

    def _known(self, at: int, tool_id: str, name: str) -> ReceivedCall:
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
            # A different id together with a name means another call, even with the same index.
            return None if name and tool_id and known and tool_id != known else at
        if tool_id:
            return next((at for at, call in enumerate(self.calls) if call.tool_id == tool_id), None)
        return None if name or not self.calls else len(self.calls) - 1

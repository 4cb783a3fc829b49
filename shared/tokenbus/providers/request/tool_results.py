"""Pairs tool calls with their results: each result right after its calls, each id used once.

All provider APIs reject a call without a result and a result without a call, and require results right after the calls.
Histories break these rules if a client trims them or stops a run inside a turn. Some models reuse call ids
(``functions.weather:0`` in every turn), and some APIs reject that.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tokenbus.events.requests import ContentPart, ToolCallPart, ToolResultPart
from tokenbus.providers.request.turns import Notes, Spoken

NO_RESULT = "No result: the call was never answered."
"""The error result that the model sees for an orphan call."""


class _Answer(msgspec.Struct):
    """A call and, once found, its result."""

    call: ToolCallPart
    given_id: str
    """The id in the history."""
    result: ToolResultPart | None = None


class _Answers(msgspec.Struct):
    """The slot right after an assistant message that holds the results of its calls."""

    answers: list[_Answer]
    where: str
    place: int
    """Index among the messages."""
    unanswered: dict[str, deque[_Answer]] = {}
    """By given id, in order; ids may repeat."""
    extra: dict[str, object] = {}
    """Further fields of the messages that had the results."""

    def __post_init__(self) -> None:
        for answer in self.answers:
            self.unanswered.setdefault(answer.given_id, deque()).append(answer)

    def take(self, result: ToolResultPart, message: Spoken) -> bool:
        """Assign the result in a message to its call. Return False if no call with this id is still unanswered."""
        waiting = self.unanswered.get(result.tool_id)
        if waiting is None:
            return False
        answer = waiting.popleft()
        answer.result = msgspec.structs.replace(result, tool_id=answer.call.tool_id)
        self.extra = {**self.extra, **message.extra}
        if not waiting:
            del self.unanswered[result.tool_id]
        return True

    def spoken(self, notes: Notes) -> Spoken:
        parts: list[ContentPart] = []
        for answer in self.answers:
            call = answer.call
            if answer.result is None:
                notes.add(
                    self.where,
                    f"the call {call.tool_id} of {call.tool_name} has no result; an error result was inserted",
                )
                parts.append(
                    ToolResultPart(tool_id=call.tool_id, tool_name=call.tool_name, content=NO_RESULT, is_error=True)
                )
            else:
                parts.append(answer.result)
        return Spoken("tool", parts, self.where, extra=self.extra)


class Calls:
    """Orders a conversation's messages and places each result after its calls."""

    def __init__(self, notes: Notes, *, unique_ids: bool) -> None:
        """``unique_ids``: ids must be unique in the whole conversation rather than within one message."""
        self._notes = notes
        self._unique_ids = unique_ids
        self._out: list[Spoken | _Answers] = []
        self._waiting: list[_Answers] = []
        self._ids: set[str] = set()
        self._suffixes: dict[str, int] = {}
        """By id in the history: the next suffix to try."""

    def add(self, message: Spoken, after: Spoken | None = None) -> None:
        """Add the next message. ``after``: a synthetic message to insert after it and its tool results."""
        rest: list[ContentPart] = []
        answers: list[_Answer] = []
        if not self._unique_ids:
            self._ids, self._suffixes = set(), {}
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                self._place(part, message)
            elif isinstance(part, ToolCallPart):
                call = self._named(part, message.where)
                answers.append(_Answer(call, part.tool_id))
                rest.append(call)
            else:
                rest.append(part)
        if rest:
            self._out.append(msgspec.structs.replace(message, parts=rest))
        if answers:
            self._waiting.append(_Answers(answers, message.where, len(self._out)))
            self._out.append(self._waiting[-1])
        if after:
            self._out.append(after)

    @property
    def spoken(self) -> list[Spoken]:
        """The messages so far, with a result for every call."""
        return [m.spoken(self._notes) if isinstance(m, _Answers) else m for m in self._out]

    def _named(self, call: ToolCallPart, where: str) -> ToolCallPart:
        """Rename the call if its id is already in use."""
        tool_id, n = call.tool_id, self._suffixes.get(call.tool_id, 2)
        while tool_id in self._ids:
            tool_id, n = f"{call.tool_id}_{n}", n + 1
        self._ids.add(tool_id)
        self._suffixes[call.tool_id] = n
        if tool_id == call.tool_id:
            return call
        self._notes.add(where, f"the tool id {call.tool_id!r} is already used by an earlier call; sent as {tool_id!r}")
        return msgspec.structs.replace(call, tool_id=tool_id)

    def _place(self, result: ToolResultPart, message: Spoken) -> None:
        """Attach a result to its call: the latest unanswered one with its id, because ids repeat across turns."""
        for answers in reversed(self._waiting):
            if answers.take(result, message):
                if self._moved(answers):
                    self._notes.add(message.where, f"the result of call {result.tool_id} was moved to its call")
                if not answers.unanswered:
                    self._waiting.remove(answers)
                return
        self._notes.add(message.where, f"the result of call {result.tool_id} has no call before it and was left out")

    def _moved(self, answers: _Answers) -> bool:
        """Whether another message stands between the calls and the current position."""
        return any(not isinstance(one, Spoken) or one.where != answers.where for one in self._out[answers.place + 1 :])

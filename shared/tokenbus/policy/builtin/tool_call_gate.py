"""Base class of policies that judge tool calls: a call is held until it is complete and judged, while text passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeAlias

import msgspec

from tokenbus.policy.processor import NewText, NewToolCall, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import ServerToolStreamBlock, StreamState, ToolCallStreamBlock


class Block:
    """Verdict: withhold the call. ``notice`` is sent in its place as text; empty: nothing is sent."""

    def __init__(self, reason: str, notice: str = "") -> None:
        self.reason = reason
        self.notice = notice


class Replace:
    """Verdict: send this call instead."""

    def __init__(self, call: NewToolCall, reason: str = "") -> None:
        self.call = call
        self.reason = reason


Verdict: TypeAlias = Block | Replace | None
"""None: send the call unchanged."""


class ToolCallGate(StreamProcessor, ABC):
    """Releases a tool call if `judge` allows it.

    A call that is cut off is never released, because it cannot be judged.
    """

    side_by_side: ClassVar[bool] = False
    """Whether the stream continues while a call is judged. Calls are then judged in parallel and released in order,
    but text after a call may be sent before it.
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._held: dict[int, list[Any]] = {}

    @abstractmethod
    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        """Judge a complete call. An exception or a timeout is an error of the policy."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if isinstance(state.chunk_block, ToolCallStreamBlock):
            self._held.setdefault(state.chunk_block.number, []).append(chunk)
        if isinstance(done := state.just_completed, ToolCallStreamBlock):
            held = self._held.pop(done.number, [])
            if self.side_by_side:
                context.later(self._judged(done, held, context), holding=held)
            else:
                for item in await self._judged(done, held, context):
                    await context.send(item)
        if state.just_cut:
            self._held.pop(state.just_cut.number, None)
        if not isinstance(state.chunk_block, ToolCallStreamBlock):
            await context.send(chunk)

    async def _judged(self, call: ToolCallStreamBlock, held: list[Any], context: StreamContext[Any]) -> Sequence[Any]:
        match await self.judge(call, context):
            case Block() as verdict:
                context.decided("block", call, reason=verdict.reason, final=verdict.notice or None)
                return [NewText(verdict.notice)]
            case Replace() as verdict:
                context.decided("replace", call, reason=verdict.reason, final=verdict.call.arguments)
                return [verdict.call]
            case _:
                return held


# Allows or denies tools by name: those of the request, and those that the provider runs itself.


class ToolRulesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names may contain ``*`` and ``?``. ``deny`` takes precedence over ``allow``."""

    allow: list[str] | None = None
    """Allow only these; None: all that are not denied."""
    deny: list[str] = []
    notice: str = ""
    """Sent in place of a blocked call; ``{tool}`` is its name. Empty: nothing is sent."""


class ToolRules(ToolCallGate):
    """Releases only calls of allowed tools. A tool that the provider runs has run by then: what it was asked and what
    it found is withheld, from subscribers and from later requests.
    """

    Options = ToolRulesOptions
    options: ToolRulesOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._withheld: dict[int, str] = {}
        """Ids of the withheld blocks of tools that the provider runs, by number."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        block = state.chunk_block
        if not isinstance(block, ServerToolStreamBlock):
            await super().on_chunk(chunk, state, context)
        elif not (block.name and (reason := self._problem(block.name))):
            await context.send(chunk)
        else:
            if block.id not in self._withheld.values():
                await context.send(NewText(self._notice(block.name)))
            self._withheld[block.number] = block.id
            if state.just_completed is block:
                context.decided("block", block, reason=reason)

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        reason = self._problem(call.name)
        return Block(reason, self._notice(call.name)) if reason else None

    def _problem(self, name: str) -> str:
        if any(fnmatchcase(name, rule) for rule in self.options.deny):
            return "the tool is denied"
        if self.options.allow is not None and not any(fnmatchcase(name, rule) for rule in self.options.allow):
            return "the tool is not allowed"
        return ""

    def _notice(self, name: str) -> str:
        return self.options.notice.replace("{tool}", name)

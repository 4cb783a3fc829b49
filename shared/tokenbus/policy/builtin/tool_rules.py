"""Allows or denies tools by name: those of the request, and those that the provider runs itself."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import msgspec

from tokenbus.policy.builtin.tool_call_gate import Block, ToolCallGate, Verdict
from tokenbus.policy.processor import NewText, StreamContext
from tokenbus.policy.stream_state import ServerToolStreamBlock, StreamState, ToolCallStreamBlock


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

"""Allows or denies tools by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import msgspec

from tokenbus.policy.builtin.tool_call_gate import Block, ToolCallGate, Verdict
from tokenbus.policy.processor import StreamContext
from tokenbus.policy.stream_state import ToolCallStreamBlock


class ToolRulesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names may contain ``*`` and ``?``. ``deny`` takes precedence over ``allow``."""

    allow: list[str] | None = None
    """Allow only these; None: all that are not denied."""
    deny: list[str] = []
    notice: str = ""
    """Sent in place of a blocked call; ``{tool}`` is its name. Empty: nothing is sent."""


class ToolRules(ToolCallGate):
    """Releases only calls of allowed tools."""

    Options = ToolRulesOptions
    options: ToolRulesOptions

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        reason = ""
        if any(fnmatchcase(call.name, rule) for rule in self.options.deny):
            reason = "the tool is denied"
        elif self.options.allow is not None and not any(fnmatchcase(call.name, rule) for rule in self.options.allow):
            reason = "the tool is not allowed"
        return Block(reason, self.options.notice.replace("{tool}", call.name)) if reason else None

"""Which tools may be called, by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import msgspec

from tokenbus.policy.builtin.tool_call_gate import Block, ToolCallGate, Verdict
from tokenbus.policy.processor import StreamContext
from tokenbus.policy.stream_state import ToolCallStreamBlock


class ToolRulesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names may hold ``*`` and ``?``. A denied tool is denied, whatever allows it."""

    allow: list[str] | None = None
    """Only these; None: all that are not denied."""
    deny: list[str] = []
    notice: str = ""
    """Said in place of a blocked call; ``{tool}`` is its name. Empty: nothing is said."""


class ToolRules(ToolCallGate):
    """Lets only calls of allowed tools through."""

    Options = ToolRulesOptions
    options: ToolRulesOptions

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        reason = ""
        if any(fnmatchcase(call.name, rule) for rule in self.options.deny):
            reason = "the tool is denied"
        elif self.options.allow is not None and not any(fnmatchcase(call.name, rule) for rule in self.options.allow):
            reason = "the tool is not allowed"
        return Block(reason, self.options.notice.replace("{tool}", call.name)) if reason else None

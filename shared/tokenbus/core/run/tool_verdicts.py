"""Which of a turn's calls its policies let through, and as what."""

from __future__ import annotations

import msgspec

from tokenbus.core.run.blocks import ToolCall

BLOCKED = "the call was blocked by a policy"
"""What the model reads where the policy gave no reason."""


class ToolVerdicts(msgspec.Struct):
    """The calls of one turn that were heard, and why others were not."""

    heard: list[ToolCall] = []
    reasons: dict[str, str] = {}
    """By the id of the call."""

    def take(self, call: ToolCall) -> ToolCall | None:
        """What became of this call of the model; None: it was held back. Two calls of one id are told apart by order.

        Calls that a policy made up have no place in what the model said: they are heard, and never run.
        """
        for i, heard in enumerate(self.heard):
            if heard.tool_id == call.tool_id:
                del self.heard[i]
                as_it_was = heard.arguments == call.arguments
                return msgspec.structs.replace(heard, problem=call.problem if as_it_was else "")
        return None

    def reason(self, call: ToolCall) -> str:
        """What the model reads in place of a result."""
        reason = self.reasons.get(call.tool_id)
        return f"{BLOCKED}: {reason}" if reason else BLOCKED

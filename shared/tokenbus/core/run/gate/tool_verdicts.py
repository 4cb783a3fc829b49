"""The tool calls of a turn that its policies released, and in which form."""

from __future__ import annotations

import msgspec

from tokenbus.core.run.blocks.block_table import CompleteCall

BLOCKED = "the call was blocked by a policy"
"""What the model reads if the policy gave no reason."""


class ToolVerdicts(msgspec.Struct):
    """The published calls of one turn, and the reasons for blocking others."""

    released: list[CompleteCall] = []
    reasons: dict[str, str] = {}
    """Reason by call id."""

    def take(self, call: CompleteCall) -> CompleteCall | None:
        """Remove and return the published form of a model's call; None: it was held back.

        Calls with the same id match in order. Calls that a policy invented match no call of the model: they are
        published but never run.
        """
        for i, released in enumerate(self.released):
            if released.tool_id == call.tool_id:
                del self.released[i]
                unchanged = released.arguments == call.arguments
                return msgspec.structs.replace(released, problem=call.problem if unchanged else "")
        return None

    def reason(self, call: CompleteCall) -> str:
        """Text for the model instead of a result."""
        reason = self.reasons.get(call.tool_id)
        return f"{BLOCKED}: {reason}" if reason else BLOCKED

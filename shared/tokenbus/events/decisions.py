"""Records of policy decisions: the topic `decisions`.

It contains the original content that was withheld from subscribers, so it is a separate topic for authorized readers
and not part of any run's log. Each decision is one JSON object in the stream field ``__data__``, as on the public
topics.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.frames import PolicyAction, RecordedDecision


class Decided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="decision", tag_field="type"):
    """One decision of one policy. ``n`` counts a run's decisions from 0 without gaps."""

    run: str
    n: int
    turn: int
    attempt: int
    policy: str
    action: PolicyAction
    reason: str | None = None
    block: int | None = None
    """Block number seen by the policy; the published block, if any, may have another number."""
    tool_id: str | None = None
    tool_name: str | None = None
    original: str | None = None
    """The content, or a call's raw arguments, as the model or tool produced it."""
    final: str | None = None
    """The published replacement; absent: nothing was published."""

    @property
    def seq(self) -> int:
        """``n``, under the name that run events use. Decisions are numbered separately."""
        return self.n

    @classmethod
    def of(cls, run: str, n: int, turn: int, attempt: int, decision: RecordedDecision) -> Decided:
        """Build the published record of a decision."""
        return cls(
            run=run,
            n=n,
            turn=turn,
            attempt=attempt,
            policy=decision.policy,
            action=decision.action,
            reason=decision.reason or None,
            block=decision.block,
            tool_id=decision.tool_id,
            tool_name=decision.tool_name,
            original=decision.original,
            final=decision.final,
        )


decoder = msgspec.json.Decoder(Decided)
encode = msgspec.json.Encoder().encode

"""What policies did, for the record: the topic `decisions`.

It holds what nobody was to hear, the originals; so it is a topic of its own, in no run's log, for those who may see
that. Each is one JSON object in the stream field ``__data__``, as on the public topics.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.frames import Decision, PolicyAction


class Decided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="decision", tag_field="type"):
    """One decision of one policy. ``n`` counts those of a run from 0 without a gap."""

    run: str
    n: int
    turn: int
    attempt: int
    policy: str
    action: PolicyAction
    reason: str | None = None
    block: int | None = None
    """As the policy saw it: not the number under which it is heard, if it is."""
    tool_id: str | None = None
    tool_name: str | None = None
    original: str | None = None
    """The content, or a call's raw arguments, as the model or the tool gave them."""
    final: str | None = None
    """What is heard in its place; left out: nothing."""

    @property
    def seq(self) -> int:
        """``n``, by the name that events of runs have for it. These are counted on their own."""
        return self.n

    @classmethod
    def of(cls, run: str, n: int, turn: int, attempt: int, decision: Decision) -> Decided:
        """The decision as it is told."""
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

"""What a run waits for: a person's decision on a tool call, an answer to a question, the result of a client's tool."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

WaitKind: TypeAlias = Literal["approval", "answer", "tool_result"]
"""What the run waits for, which is also the ``type`` of the request that decides it. ``approval``: whether a call may
run. ``answer``: of a person, to a question. ``tool_result``: of a tool that a client runs.
"""
Verdict: TypeAlias = Literal["allow", "deny", "accept", "decline", "cancel", "result"]
"""How a wait ended. ``allow``, ``deny``: an approval. ``accept``, ``decline``, ``cancel``: an answer, or none.
``result``: a client's tool returned.
"""
Door: TypeAlias = Literal[
    "bus", "http", "cli", "console", "chat", "openai", "anthropic", "gemini", "ai_sdk", "ag_ui", "deadline"
]
"""Over which door a decision came. ``deadline``: nobody decided in time."""
OnDeadline: TypeAlias = Literal["allow", "deny", "cancel"]
"""What the deadline decides. ``deny``: the model reads that nobody decided or returned anything. ``cancel``: a question
has no answer, and its tool goes on without it.
"""
WaitId = Annotated[str, Meta(pattern=r"^[0-9]{1,9}\.[0-9]{1,6}$(?!\n)")]
"""Names a wait within its run."""
MAX_TIMEOUT_S = 6 * 86_400
"""The longest wait."""


class Excluded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an argument must not be."""

    enum: list[object]


class Condition(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"
):
    """What one argument must be, in words of JSON Schema. Of a value that is no number, the limits say nothing."""

    enum: list[object] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    not_: Excluded | None = msgspec.field(default=None, name="not")


Conditions: TypeAlias = dict[str, Condition]
"""By argument; ``a.b`` is a member of ``a``. All must hold. An argument that the call does not have fulfils any."""
ApprovalRule: TypeAlias = Literal["always", "never"] | Conditions | list[Conditions]
"""Which calls of a tool wait for a decision; of several `Conditions`, one must hold."""


class WaitInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run waits for, as `Client.waiting` lists it. Times are Unix times in ms of the server's clock."""

    run: str
    wait: str
    """Names it within its run."""
    what: WaitKind
    tool_id: str
    tool_name: str
    since_ms: int
    deadline_ms: int
    """When it decides itself, as ``on_deadline`` says."""
    on_deadline: OnDeadline = "deny"
    arguments: str | None = None
    """Of the call, as it would run: JSON, or the text of a tool whose input is free text."""
    schema: dict[str, object] | None = None
    """JSON Schema of what decides it: edited arguments, an answer's content, a result."""
    text: str | None = None
    """The question."""
    url: str | None = None
    """A page on which the question is answered, instead of ``schema``."""
    tenant: str | None = None
    """Whose clients may decide."""
    held: bool = False
    """The call waits in its worker, so the wait ends with the call."""
    durable: bool = False
    """Its run's ``durability`` is `replicated`, and so is a decision that its sender is told of."""


class WaitFate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a wait ended, by whom and over which door."""

    wait: str
    id: str
    """Of the decision."""
    decision: Verdict
    by: str | None = None
    door: Door = "bus"
    at_ms: int
    durable: bool = False
    """Who is told of it may rely on it: it is where the deployment's ``durability`` says."""


class DecisionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a decision, as its sender reads it. Empty: the run has no such wait."""

    fate: WaitFate | None = None
    """The decision that counts; the sender's own if it has its id."""
    problem: str | None = None
    """Why the decision was refused; the wait stays open."""

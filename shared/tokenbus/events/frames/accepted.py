"""What intake decides about a run when it accepts it. The run keeps it, so that a replay decides the same way."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.requests import OnFailure


class RunLimits(msgspec.Struct, frozen=True, array_like=True):
    """The settings in force when the run was accepted, so that a replay decides the same way."""

    max_attempts: int = 4
    """Maximum tries of one turn that end in a provider error, including the first."""
    max_losses: int = 20
    """Maximum tries of one turn that end in a lost worker."""
    base_delay_ms: int = 500
    max_delay_ms: int = 30_000
    block_chars: int = 2**20
    """Maximum characters of one block."""
    run_events: int = 500_000
    """Maximum input events of the run, from its provider and its tools."""
    turn_bytes: int = 64 * 2**20
    """Maximum bytes of events of one turn, over all its attempts."""
    run_bytes: int = 256 * 2**20
    """Maximum bytes of events of the run."""


class TextReading(msgspec.Struct, frozen=True, array_like=True):
    """How to parse the continued text (prefill mode), decided when the run was accepted."""

    stops: tuple[str, ...] = ()
    """Stop strings for top-level text, whether or not they were sent to the provider."""
    types: dict[str, dict[str, list[str]]] = {}
    """By tool and parameter: the JSON types of parameters that are not plain text."""
    inside: str = ""
    """The thinking tag that the prompt itself opened."""
    thinking: tuple[str, ...] = ("thinking",)
    """Names of the tags that hold thinking."""
    end_of_turn: str = ""
    """The token that ends the turn wherever it appears; empty: none."""
    follows_a_name: bool = False
    """The text begins after ``Name:``, so a leading space is not part of it."""


class PolicyPlan(msgspec.Struct, frozen=True, array_like=True):
    """The run's policies, decided when it was accepted."""

    names: tuple[str, ...]
    """In order of application; the names are settings tables of the deployment."""
    on_error: Literal["pass", "block"] = "block"
    """What happens to the run if no policy worker answers."""
    patience_ms: int = 60_000
    """How long to wait for a policy worker's answer."""


class FallbackPlan(msgspec.Struct, frozen=True, array_like=True):
    """A provider and model to try if the earlier ones failed, decided when the run was accepted."""

    provider: str
    model: str
    reading: TextReading | None = None
    """As `Accepted.reading`, for this provider."""
    continues: bool = False
    """As `Accepted.continues`, for this provider and model."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="accepted"):
    """A run begins: what the parser needs to know about its request."""

    provider: str
    model: str
    on_failure: OnFailure
    max_tool_depth: int
    rules: RunLimits
    tools: list[str]
    """The run's tools; a call to any other never runs."""
    tool_timeout_s: float | None = None
    metadata: dict[str, object] | None = None
    reading: TextReading | None = None
    """Prefill mode: how to parse the model's text; None in chat mode."""
    continues: bool = False
    """Provider and model can continue a partial text (`on_failure` continue)."""
    deadline_ms: int = 0
    """Unix time at which the run fails in any case; 0: never."""
    stops: tuple[str, ...] = ()
    """Chat mode: the request's stop strings, which end the turn whether or not they were sent to the provider."""
    record: bool = False
    """The run is recorded: the parser's input is written to its tape, and the recorder is notified of its end."""
    policy_plan: PolicyPlan | None = None
    """Policies that judge the run before it is published; None: there are none."""
    visible: bool = True
    """The run's text is visible."""
    fallback: tuple[FallbackPlan, ...] = ()
    """In the order in which they are tried."""
    notes: tuple[str, ...] = ()
    """Intake's notes about the request, published in the run's `started` event."""
    participant: str | None = None
    """The model's participant name."""
    traceparent: str = ""
    """The publisher's trace context; empty: it gave none."""
    commentary: bool = True
    """The model's commentary is visible, as its other text."""

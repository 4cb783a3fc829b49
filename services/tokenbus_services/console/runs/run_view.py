"""What the console says of a run: a row, folded from its events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tokenbus.bus.scripts.gateway import NANO
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    Answering,
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    ToolProgress,
    UsageReported,
)
from tokenbus.events.usage import Usage
from tokenbus_services.console.access.hiding import hidden_error
from tokenbus_services.pricing import PriceTable, token_counts
from tokenbus_services.settings import Settings

State = Literal[
    "queued",
    "waiting",
    "first_byte",
    "thinking",
    "speaking",
    "tool",
    "retrying",
    "judged",
    "completed",
    "incomplete",
    "failed",
    "cancelled",
]
MAX_WORDS = 120
"""Characters of a run's last words."""
CHARACTERS_PER_TOKEN = 4
_BLANKS = re.compile(r"\s+")
_STATES_OF_KINDS: dict[str, State] = {
    "text": "speaking",
    "audio": "speaking",
    "thinking": "thinking",
    "tool_call": "tool",
    "server_tool": "tool",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the river."""

    run: str
    state: State
    tenant: str | None = None
    provider: str | None = None
    model: str | None = None
    started_at: int | None = None
    """Unix time in ms, like `ended_at`."""
    ended_at: int | None = None
    finish: str | None = None
    error: str | None = None
    """Code."""
    turn: int = 0
    attempt: int = 0
    tokens_per_s: float | None = None
    """Estimated from characters."""
    words: str | None = None
    """Its last words; None for viewers who may not see content."""
    cost: float | None = None
    usage: dict[str, Any] | None = None


class AttemptView(msgspec.Struct, kw_only=True):
    """One call of a provider, as the run's events show it."""

    turn: int
    attempt: int
    provider: str | None
    model: str | None
    first_seq: int
    last_seq: int
    error: dict[str, Any] | None = None
    delay_ms: int | None = None
    """Wait before the next attempt."""
    continues: bool | None = None
    """Whether the next attempt continues its text."""
    usage: dict[str, Any] | None = None
    response_id: str | None = None


def state_after(event: PublicEvent) -> State | None:
    """The run's state after this event; None if the event does not determine it."""
    match event:
        case Completed():
            return "completed"
        case Incomplete():
            return "incomplete"
        case RunFailedEvent():
            return "failed"
        case Cancelled():
            return "cancelled"
        case Retrying() | Restarted():
            return "retrying"
        case ToolProgress():
            return "tool"
        case BlockComplete(kind="tool_call" | "tool_result") | BlockStarted(kind="tool_result"):
            return "tool"  # other calls may be open; once all have results, the next attempt begins
        case Started():
            return "first_byte"
        case Chunk() | BlockStarted() | BlockComplete():
            return _STATES_OF_KINDS.get(event.kind, "speaking")
        case _:
            return None


def end_of_text(events: Iterable[PublicEvent]) -> str:
    """The end of the visible text in these events, in order; of thinking if there is none."""
    chunks = [event for event in events if isinstance(event, Chunk)]
    visible = "".join(chunk.text for chunk in chunks if chunk.visible)
    text = visible or "".join(chunk.text for chunk in chunks if chunk.kind == "thinking")
    return _BLANKS.sub(" ", text)[-MAX_WORDS:]


def usage_shown(usage: Usage | None) -> dict[str, Any] | None:
    """Token counts without the provider's own object."""
    return msgspec.to_builtins(msgspec.structs.replace(usage, raw=None)) if usage else None


def attempts_of(events: Iterable[PublicEvent], *, content: bool) -> list[AttemptView]:
    """The attempts of a run, in order, from the first and the last events of each."""
    found: dict[tuple[int, int], AttemptView] = {}
    provider = model = None
    for event in events:
        if isinstance(event, Started):
            provider, model = event.provider, event.model
        attempt = found.setdefault(
            (event.turn, event.attempt),
            AttemptView(
                turn=event.turn,
                attempt=event.attempt,
                provider=provider,
                model=model,
                first_seq=event.seq,
                last_seq=event.seq,
            ),
        )
        attempt.last_seq = event.seq
        match event:
            case Retrying() | Restarted():
                attempt.error = _error(event.error, content=content)
                attempt.delay_ms = event.delay_ms
                if isinstance(event, Retrying):
                    attempt.continues = event.continues
                    if event.fallback:
                        provider, model = event.fallback.provider, event.fallback.model
            case UsageReported():
                attempt.usage = usage_shown(event.usage)
            case Answering():
                attempt.response_id = event.response_id
                attempt.model = event.model or attempt.model
            case RunFailedEvent() | Incomplete():
                attempt.error = _error(event.error, content=content) if event.error else None
            case _:
                pass
    return list(found.values())


def _error(error: ErrorInfo, *, content: bool) -> dict[str, Any]:
    return msgspec.to_builtins(error) if content else hidden_error(error)


class Costs:
    """The deployment's prices."""

    def __init__(self, settings: Settings) -> None:
        self._prices = PriceTable(settings.gateway.prices if settings.gateway else {})
        self._apis = {name: provider.api for name, provider in settings.providers.items()}

    def cost(self, usage: Usage | None, provider: str | None, models: list[str | None]) -> float | None:
        """The cost of this usage at the first of the models' names that has a price; None if none has one."""
        if usage is None or provider is None:
            return None
        name = self._prices.name_for([f"{provider}/{model}" for model in models if model])
        if name is None:
            return None
        counts = token_counts(usage, self._apis.get(provider, ""))
        prices = self._prices.nano_per_token(name)
        used = (counts.fresh, counts.cache_read, counts.cache_write, counts.output)
        return sum(n * price for n, price in zip(used, prices, strict=True)) / NANO

"""What a gateway knows of one run on the river, from its summary and the last events that it looked at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tokenbus.bus.run_index import Summary
from tokenbus.events.frames import TurnWork
from tokenbus.events.public import Chunk, PublicEvent, RunEnd
from tokenbus.events.run_info import RunInfo
from tokenbus_services.console.runs.run_view import (
    CHARACTERS_PER_TOKEN,
    MAX_WORDS,
    Row,
    State,
    end_of_text,
    state_after,
    usage_shown,
)

_RATE_S = 0.9
"""Shortest time over which a rate is measured."""
JUDGED_MS = 250
"""A run whose output waits for its policies for this long is shown as judged: most verdicts take less."""
_SMOOTH = 0.5
"""Share of the newest second in the shown rate."""


class KnownRun:
    """Grows as the sampler looks at it."""

    def __init__(self, summary: Summary) -> None:
        info = self.info = summary.info
        self._judging_ms = summary.judging_ms
        self.waiting: TurnWork | None = None
        """Its turn, if that waits in front of its provider."""
        self.text = _searched(info)
        """What a search looks at."""
        self.seq = -1
        """The newest event that was looked at."""
        self.end: RunEnd | None = None
        self.cost: float | None = None
        self._words = ""
        self._last_state: State | None = None
        """The state after its newest event, which was one of this attempt:"""
        self._last_attempt = 0
        self._chars = 0.0
        """Characters of an event, on average over those that were looked at last."""
        self._rate: float | None = None
        self._counted: tuple[float, int] | None = None
        """When the events were counted last, and how many there were."""

    @property
    def needs_look(self) -> bool:
        """Whether there are events that were not examined yet."""
        return self.info.events - 1 > self.seq

    @property
    def is_silent(self) -> bool:
        """Whether its current attempt has published nothing yet."""
        return self.info.is_open and (
            self._last_attempt < self.info.attempt or self._last_state in (None, "first_byte")
        )

    def update(self, summary: Summary, now: float) -> None:
        """Take in a newer summary. ``now``: a monotonic time in seconds."""
        info = summary.info
        self._judging_ms = summary.judging_ms
        if (info.provider, info.model, info.tenant, info.error) != (
            self.info.provider,
            self.info.model,
            self.info.tenant,
            self.info.error,
        ):
            self.text = _searched(info)
        self.info = info
        if self._counted is None:
            self._counted = (now, info.events)
        elif now - self._counted[0] >= _RATE_S:
            before, events = self._counted
            rate = max(0, info.events - events) / (now - before) * self._chars / CHARACTERS_PER_TOKEN
            self._rate = rate if self._rate is None else _SMOOTH * rate + (1 - _SMOOTH) * self._rate
            self._counted = (now, info.events)

    def look(self, events: Sequence[PublicEvent]) -> None:
        """Take in the newest events of its log, in order."""
        fresh = [event for event in events if event.seq > self.seq]
        if not fresh:
            return
        last_words = end_of_text(fresh)
        goes_on = fresh[0].seq == self.seq + 1
        if last_words:
            self._words = (self._words + last_words if goes_on and self._words else last_words)[-MAX_WORDS:]
        chunks = [len(event.text) for event in fresh if isinstance(event, Chunk)]
        if chunks:
            self._chars = sum(chunks) / len(fresh)
        for event in fresh:
            self._last_state = state_after(event) or self._last_state
        last = fresh[-1]
        self.seq = last.seq
        self._last_attempt = last.attempt
        if isinstance(last, RunEnd):
            self.end = last

    def state(self, now_ms: int) -> State:
        """What the run does at this time of the server's clock."""
        info = self.info
        if not info.is_open:
            return cast("State", info.state)
        if self._judging_ms and now_ms - self._judging_ms >= JUDGED_MS:
            return "judged"
        if not self.is_silent and self._last_state:
            return self._last_state
        turn = self.waiting
        if turn and turn.attempt >= info.attempt:
            return "retrying" if turn.not_before_ms > now_ms else "waiting"
        return "queued" if info.events == 0 else "first_byte"

    def row(self, now_ms: int, *, content: bool) -> Row:
        """The line of the river."""
        info = self.info
        usage = self.end.usage if self.end else None
        return Row(
            run=info.run,
            state=self.state(now_ms),
            tenant=info.tenant,
            provider=info.provider,
            model=info.model,
            started_at=info.accepted_ms,
            ended_at=info.ended_ms,
            finish=info.finish,
            error=info.error,
            turn=info.turn,
            attempt=info.attempt,
            tokens_per_s=round(self._rate, 1) if self._rate is not None and info.is_open else None,
            words=self._words if content else None,
            cost=self.cost,
            usage=usage_shown(usage),
        )


def _searched(info: RunInfo) -> str:
    parts = (info.run, info.tenant, info.provider, info.model, info.error)
    return "\n".join(part for part in parts if part).lower()

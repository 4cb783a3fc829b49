"""The last hour: plots, and the providers' last minutes, from the slots that the parsers write.

The slots are in Redis, so any gateway shows the same hour, also one that has just started.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tokenbus.bus.activity import (
    BOUNDS_MS,
    HOUR_SLOTS,
    SLOT_MS,
    Activity,
    ProviderActivity,
    activity_of,
    percentile_ms,
    slot_of,
)
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.console.health import ProviderHealth

STEP_S = SLOT_MS // 1000
UNFINISHED = 1
"""Newest slots that may still grow: what is counted later goes into a later one."""
MINUTES_5 = 300 // STEP_S
MAX_PROVIDERS = 100


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the plots."""

    at: int
    runs_ended: int
    runs_failed: int
    chars_per_s: float
    open: int
    first_byte_p50_ms: int | None


class Plots(msgspec.Struct, frozen=True, kw_only=True):
    """Points, oldest first."""

    step_s: int = STEP_S
    points: list[Point]


class LastHour:
    """Reads each finished slot once."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys
        self._slots: dict[int, Activity] = {}

    async def read(self) -> None:
        """Read the slots that are not known or may have grown. Raises redis-py's errors."""
        now = slot_of(self._server.clock.now_ms())
        hour = range(now - HOUR_SLOTS, now + 1)
        wanted = [slot for slot in hour if slot >= now - UNFINISHED or slot not in self._slots]
        pipe = self._server.client.pipeline(transaction=False)
        for slot in wanted:
            pipe.hgetall(self._keys.activity(slot))
        replies: list[Any] = await pipe.execute()
        for slot, fields in zip(wanted, replies, strict=True):
            self._slots[slot] = activity_of(fields)
        for slot in [slot for slot in self._slots if slot < now - HOUR_SLOTS]:
            del self._slots[slot]

    def plots(self, *, after: int = 0) -> Plots:
        """The finished slots later than ``after``, a slot's number."""
        newest = max(self._slots, default=0) - UNFINISHED
        return Plots(points=[_point(slot, self._slots[slot]) for slot in sorted(self._slots) if after < slot <= newest])

    @property
    def newest(self) -> int:
        """The newest finished slot."""
        return max(self._slots, default=0) - UNFINISHED

    def providers(self) -> list[ProviderHealth]:
        """The last five minutes by provider and model, those with most calls first."""
        newest = max(self._slots, default=0)
        recent = [self._slots[slot] for slot in range(newest - MINUTES_5, newest + 1) if slot in self._slots]
        found: dict[tuple[str, str], ProviderActivity] = {}
        for activity in recent:
            for name, calls in activity.providers.items():
                found.setdefault(name, ProviderActivity()).add(calls)
        busiest = sorted(found.items(), key=lambda one: -one[1].attempts)[:MAX_PROVIDERS]
        return [
            ProviderHealth(
                name=provider,
                model=model,
                attempts_5m=calls.attempts,
                errors_5m=calls.errors,
                limited_5m=calls.limited,
                first_byte_p50_ms=percentile_ms(calls.first_byte, 0.5),
                first_byte_p99_ms=percentile_ms(calls.first_byte, 0.99),
            )
            for (provider, model), calls in busiest
        ]


def _point(slot: int, activity: Activity) -> Point:
    return Point(
        at=slot * SLOT_MS,
        runs_ended=activity.ended,
        runs_failed=activity.failed,
        chars_per_s=round(activity.characters / STEP_S, 1),
        open=activity.open,
        first_byte_p50_ms=percentile_ms(_summed(calls.first_byte for calls in activity.providers.values()), 0.5),
    )


def _summed(counts: Iterable[list[int]]) -> list[int]:
    total = [0] * (len(BOUNDS_MS) + 1)
    for each in counts:
        total = [a + b for a, b in zip(total, each, strict=True)]
    return total

"""The last hour: plots, and the providers' last minutes, from the slots that the parsers write.

The slots are in Redis, so any gateway shows the same hour, also one that has just started.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenbus.bus.activity import (
    BOUNDS_MS,
    HOUR_SLOTS,
    SLOT_MS,
    Activity,
    ProviderActivity,
    percentile_ms,
)
from tokenbus.bus.activity_slots import UNFINISHED, ActivitySlots
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.console.health import ProviderHealth

STEP_S = SLOT_MS // 1000
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
        self._hour = ActivitySlots(server, keys, kept=HOUR_SLOTS)

    async def read(self) -> None:
        """Read what is new. Raises redis-py's errors."""
        await self._hour.read()

    def plots(self, *, after: int = 0) -> Plots:
        """The finished slots later than ``after``, a slot's number."""
        slots = self._hour.slots
        return Plots(points=[_point(slot, slots[slot]) for slot in sorted(slots) if after < slot <= self.newest])

    @property
    def newest(self) -> int:
        """The newest finished slot."""
        return self._hour.newest - UNFINISHED

    def providers(self) -> list[ProviderHealth]:
        """The last five minutes by provider and model, those with most calls first."""
        slots, newest = self._hour.slots, self._hour.newest
        recent = [slots[slot] for slot in range(newest - MINUTES_5, newest + 1) if slot in slots]
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

"""What a deployment did in the last hour, in slots of some seconds: the names of what is counted. Pure.

Parsers count in memory and add to the slot's hash every few seconds, so the cost does not depend on how much happens.
Every hash has a TTL. What is counted twice after a take-over, or not at all after a crash, is a few seconds' worth:
this is for people who watch, not for bills.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

SLOT_MS = 10_000
HOUR_SLOTS = 360
ENDED, FAILED, CHARACTERS, OPEN = "ended", "failed", "chars", "open"
ATTEMPTS, ERRORS, LIMITED, FIRST_BYTE = "n", "err", "429", "fb"
BOUNDS_MS = (
    *(10, 20, 30, 50, 75, 100, 150, 200, 300, 400, 500, 650, 800),
    *(1_000, 1_300, 1_600, 2_000, 2_500, 3_000, 4_000, 5_000, 7_500, 10_000, 15_000, 20_000, 30_000, 60_000),
)
"""Upper bounds of the buckets for the time to a first byte; one more bucket is for what is longer."""


def slot_of(at_ms: int) -> int:
    """The number of the slot with this time."""
    return at_ms // SLOT_MS


def provider_field(provider: str, model: str, what: str) -> str:
    """The field with a count of one provider and model. Its parts are separated by a character that no name has."""
    return f"p\x1f{provider}\x1f{model}\x1f{what}"


def bucket_field(provider: str, model: str, ms: int) -> str:
    """The field that counts this time to a first byte."""
    return provider_field(provider, model, f"{FIRST_BYTE}{bisect_left(BOUNDS_MS, ms)}")


def open_field(partition: int) -> str:
    """The field with the number of a partition's open runs."""
    return f"{OPEN}\x1f{partition}"


class ProviderActivity(msgspec.Struct, kw_only=True):
    """Calls of one provider and model."""

    attempts: int = 0
    errors: int = 0
    limited: int = 0
    first_byte: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    """Counts by bucket."""

    def add(self, other: ProviderActivity) -> None:
        """Add the counts of another slot."""
        self.attempts += other.attempts
        self.errors += other.errors
        self.limited += other.limited
        self.first_byte = [a + b for a, b in zip(self.first_byte, other.first_byte, strict=True)]


class Activity(msgspec.Struct, kw_only=True):
    """One slot."""

    ended: int = 0
    failed: int = 0
    characters: int = 0
    open: int = 0
    providers: dict[tuple[str, str], ProviderActivity] = {}


def activity_of(fields: Mapping[bytes, bytes]) -> Activity:
    """Read a slot's hash. Unknown fields are of a newer version."""
    found = Activity()
    for name, value in fields.items():
        parts, number = name.decode(errors="replace").split("\x1f"), int(value)
        match parts:
            case ["ended"]:
                found.ended = number
            case ["failed"]:
                found.failed = number
            case ["chars"]:
                found.characters = number
            case ["open", _]:
                found.open += number
            case ["p", provider, model, what]:
                _count(found.providers.setdefault((provider, model), ProviderActivity()), what, number)
            case _:
                pass
    return found


def percentile_ms(counts: Sequence[int], share: float) -> int | None:
    """The bound below which this share of the times lies, interpolated in its bucket; None without any."""
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for n, count in enumerate(counts):
        if count and below + count >= wanted:
            low = BOUNDS_MS[n - 1] if n else 0
            high = BOUNDS_MS[n] if n < len(BOUNDS_MS) else 2 * BOUNDS_MS[-1]
            return round(low + (high - low) * (wanted - below) / count)
        below += count
    return BOUNDS_MS[-1]


def _count(provider: ProviderActivity, what: str, number: int) -> None:
    if what == ATTEMPTS:
        provider.attempts = number
    elif what == ERRORS:
        provider.errors = number
    elif what == LIMITED:
        provider.limited = number
    elif (n := what.removeprefix(FIRST_BYTE)).isdigit() and int(n) < len(provider.first_byte):
        provider.first_byte[int(n)] = number

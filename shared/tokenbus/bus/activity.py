"""What a deployment did in the last hour, in slots of some seconds: the names of what is counted. Pure.

Parsers count in memory and add to the slot's hash every few seconds, so the cost does not depend on how much happens.
Fetchers add how many of their calls get no answer. Every hash has a TTL. What is counted twice after a take-over, or
not at all after a crash, is a few seconds' worth: this is for people who watch, not for bills.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.error_info import ErrorInfo

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


PROVIDER_FAULTS = frozenset(
    {"auth", "rate_limit", "overloaded", "timeout", "network", "server", "protocol", "not_found"}
)
"""Classes of errors that are the provider's, its account's or the settings'. Those of a single request are left out."""
MAX_NAME_CHARS = 80
OTHER = "other"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which a provider's calls failed."""

    provider: str
    model: str
    """As requested, or `other`."""
    kind: str
    code: str
    status: int | None = None
    """HTTP status, if any."""

    @property
    def field(self) -> str:
        """The field that counts it."""
        return "\x1f".join(("x", self.provider, self.model, self.kind, self.code, str(self.status or "")))

    @property
    def merged(self) -> Failure:
        """The same of any model, without the provider's own code."""
        return Failure(provider=self.provider, model=OTHER, kind=self.kind, code=self.kind)


def failure_of(provider: str, model: str, error: ErrorInfo) -> Failure | None:
    """The name under which an error is counted; None for an error of the request itself, or the run's own deadline."""
    if error.kind not in PROVIDER_FAULTS or error.code == "deadline":
        return None
    return Failure(provider=provider, model=short(model), kind=error.kind, code=short(error.code), status=error.status)


def short(name: str) -> str:
    """A name from outside, as a part of a field: bounded, without what separates parts."""
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME_CHARS])


def silent_fields(provider: str, model: str, worker: str) -> tuple[str, str]:
    """The fields with a fetcher's calls that have no byte of an answer yet: how many, and since when the oldest."""
    return f"s\x1f{provider}\x1f{model}\x1f{worker}", f"since\x1f{provider}\x1f{model}\x1f{worker}"


def open_field(partition: int) -> str:
    """The field with the number of a partition's open runs."""
    return f"{OPEN}\x1f{partition}"


class ProviderActivity(msgspec.Struct, kw_only=True):
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
    ended: int = 0
    failed: int = 0
    characters: int = 0
    open: int = 0
    providers: dict[tuple[str, str], ProviderActivity] = {}
    failures: dict[Failure, int] = {}
    silent: dict[tuple[str, str, str], int] = {}
    """Calls without a byte of an answer, by provider, model and fetcher. Zero: all of that fetcher were answered."""
    silent_since: dict[tuple[str, str, str], int] = {}
    """Unix milliseconds."""


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
            case ["x", provider, model, kind, code, status]:
                code_status = int(status) if status.isdigit() else None
                failure = Failure(provider=provider, model=model, kind=kind, code=code, status=code_status)
                found.failures[failure] = number
            case ["s", provider, model, worker]:
                found.silent[provider, model, worker] = number
            case ["since", provider, model, worker]:
                found.silent_since[provider, model, worker] = number
            case _:
                pass
    return found


def percentile_ms(counts: Sequence[int], share: float) -> int | None:
    """The upper bound of this share of the times, interpolated within its bucket; None without times."""
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


UNFINISHED = 1
"""Number of newest slots that may still grow."""


class ActivitySlots:
    """The slots of a recent time, by number. Empty until the first `read`."""

    def __init__(self, server: Server, keys: Keys, *, kept: int) -> None:
        """``kept``: how many slots before the present one."""
        self._server = server
        self._keys = keys
        self._kept = kept
        self.slots: dict[int, Activity] = {}

    async def read(self) -> None:
        """Read the slots that are not known or may have grown. Raises redis-py's errors."""
        now = slot_of(self._server.clock.now_ms())
        recent = range(now - self._kept, now + 1)
        wanted = [slot for slot in recent if slot >= now - UNFINISHED or slot not in self.slots]
        pipe = self._server.client.pipeline(transaction=False)
        for slot in wanted:
            pipe.hgetall(self._keys.activity(slot))
        replies: list[Any] = await pipe.execute()
        for slot, fields in zip(wanted, replies, strict=True):
            self.slots[slot] = activity_of(fields)
        for slot in [slot for slot in self.slots if slot < now - self._kept]:
            del self.slots[slot]

    @property
    def newest(self) -> int:
        """The number of the newest slot; 0 before the first `read`."""
        return max(self.slots, default=0)

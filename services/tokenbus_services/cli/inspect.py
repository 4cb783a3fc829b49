"""How the providers did lately, from the deployment's activity: shown by `top`, checked by `doctor`. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
from redis.exceptions import NoPermissionError

from tokenbus.bus.activity import OTHER, SLOT_MS, Activity, ActivitySlots, Failure, slot_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus_services.cli.http_probe import ProbedPage, page

SEVERAL = 3
"""Silent calls that one slow answer cannot explain."""


class FailingModel(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's model of which calls failed lately, by how they failed most."""

    failure: Failure
    failed: int
    """Calls that failed in this way."""
    attempts: int
    """All calls of the model that ended since the first failure."""
    all_failed: int
    """Of these, all that failed, in any way."""
    since_ms: int
    """How long ago the first failure of the time that was looked at ended."""
    last_ms: int
    """How long ago the last one did, at most."""
    is_over: bool
    """Whether calls have ended since the last failure, and all well."""

    @property
    def is_down(self) -> bool:
        """Whether most of its calls fail, until now."""
        return not self.is_over and 2 * self.all_failed > self.attempts


class SilentModel(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's model of which calls have no byte of an answer now, for longer than most answers need."""

    provider: str
    model: str
    calls: int
    since_ms: int
    """How long the oldest has been silent."""
    answered: int
    """Calls of the model that ended well since then."""

    @property
    def is_down(self) -> bool:
        """Whether it is the provider rather than an answer that takes its time."""
        return self.calls >= SEVERAL and not self.answered


def failing_models(slots: Mapping[int, Activity], now_ms: int) -> list[FailingModel]:
    """The models with failures, those that fail now first."""
    failures: defaultdict[tuple[str, str], defaultdict[Failure, dict[int, int]]]
    failures = defaultdict(lambda: defaultdict(dict))
    for slot, activity in slots.items():
        for failure, count in activity.failures.items():
            failures[failure.provider, failure.model][failure][slot] = count
    found = [_failing(slots, model, kinds, now_ms) for model, kinds in failures.items()]
    return sorted(found, key=lambda each: (not each.is_down, -each.all_failed))


def _failing(
    slots: Mapping[int, Activity], model: tuple[str, str], kinds: Mapping[Failure, Mapping[int, int]], now_ms: int
) -> FailingModel:
    most, times = max(kinds.items(), key=lambda one: sum(one[1].values()))
    first, last = min(map(min, kinds.values())), max(map(max, kinds.values()))
    since = {slot: activity for slot, activity in slots.items() if slot >= first}
    # Models that have never answered are counted together as `other`: all their calls are those that failed.
    named = {slot: activity for slot, activity in since.items() if model[1] != OTHER}
    ended = {slot: activity.providers[model] for slot, activity in named.items() if model in activity.providers}
    all_failed = sum(sum(each.values()) for each in kinds.values())
    return FailingModel(
        failure=most,
        failed=sum(times.values()),
        attempts=max(all_failed, sum(calls.attempts for calls in ended.values())),
        all_failed=all_failed,
        since_ms=max(0, now_ms - first * SLOT_MS),
        last_ms=max(0, now_ms - last * SLOT_MS),
        is_over=any(slot > last and calls.attempts > calls.errors for slot, calls in ended.items()),
    )


def silent_models(slots: Mapping[int, Activity], now_ms: int) -> list[SilentModel]:
    """The models with silent calls now, most first. Each fetcher's newest word counts, of this slot or the last."""
    newest: dict[tuple[str, str, str], tuple[int, int]] = {}
    for _, activity in sorted(_recent(slots)):
        for name, calls in activity.silent.items():
            newest[name] = calls, activity.silent_since.get(name, now_ms)
    found: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for (provider, model, _), (calls, since) in newest.items():
        if calls:
            found[provider, model].append((calls, since))
    silent = [
        SilentModel(
            provider=provider,
            model=model,
            calls=sum(calls for calls, _ in each),
            since_ms=max(0, now_ms - min(since for _, since in each)),
            answered=_answered(slots, provider, model, min(since for _, since in each)),
        )
        for (provider, model), each in found.items()
    ]
    return sorted(silent, key=lambda each: -each.calls)


def _recent(slots: Mapping[int, Activity]) -> Iterable[tuple[int, Activity]]:
    newest = max(slots, default=0)
    return [(slot, activity) for slot, activity in slots.items() if slot >= newest - 1]


def _answered(slots: Mapping[int, Activity], provider: str, model: str, since_ms: int) -> int:
    calls = [a.providers.get((provider, model)) for slot, a in slots.items() if slot > slot_of(since_ms)]
    return sum(each.attempts - each.errors for each in calls if each)


# What the blob store says of its last failure, on its health page.


class BlobFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The latest request that the store failed."""

    code: str
    ago_s: int


class _Health(msgspec.Struct, frozen=True):
    last_failure: BlobFailure | None = None


async def blob_failure(url: str, *, within_s: float) -> BlobFailure | None:
    """The store's last failure, if that was lately. Raises OSError, and ValueError if the answer is not HTTP."""
    return last_failure(await page(f"{url.rstrip('/')}/health"), within_s=within_s)


def last_failure(health: ProbedPage, *, within_s: float) -> BlobFailure | None:
    """The failure on this page, if it is of the last ``within_s``; None also for a page of something else."""
    try:
        found = msgspec.json.decode(health.body, type=_Health).last_failure
    except msgspec.DecodeError:
        return None
    return found if found and found.ago_s <= within_s else None


# What is wrong outside the bus now: providers and the blob store, looked at again and again.

LATELY_S = 120


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What fails now."""

    failing: list[FailingModel] = []
    """Models with calls that failed lately and none that ended well afterwards."""
    silent: list[SilentModel] = []
    blobs: BlobFailure | None = None


class TroubleObserver:
    """Looks at what the deployment counted, and at the blob store."""

    def __init__(self, server: Server, keys: Keys, *, blobs_url: str | None) -> None:
        """``blobs_url``: None if the blob service is not this project's."""
        self._server = server
        self._blobs_url = blobs_url
        self._activity = ActivitySlots(server, keys, kept=LATELY_S * 1000 // SLOT_MS)

    async def look(self) -> Trouble:
        """Look once. What this user may not see, or does not answer, is left out. Raises ServerUnavailable."""
        with translated(self._server), suppress(NoPermissionError):
            await self._server.clock.measure()
            await self._activity.read()
        slots, now_ms = self._activity.slots, self._server.clock.now_ms()
        return Trouble(
            failing=[each for each in failing_models(slots, now_ms) if not each.is_over],
            silent=silent_models(slots, now_ms),
            blobs=await self._blob_failure(),
        )

    async def _blob_failure(self) -> BlobFailure | None:
        if self._blobs_url is None:
            return None
        with suppress(OSError, ValueError):
            return await blob_failure(self._blobs_url, within_s=LATELY_S)
        return None

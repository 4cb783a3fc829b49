"""Sends the pages of the console what changed: samples all runs once a second while a page is open.

Pages with equal views share their rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus.activity import (
    BOUNDS_MS,
    HOUR_SLOTS,
    SLOT_MS,
    UNFINISHED,
    Activity,
    ActivitySlots,
    ProviderActivity,
    percentile_ms,
)
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, rest, slack, stop_task
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import TokenbusError
from tokenbus_services.console.health import Health, ProviderHealth, health_of
from tokenbus_services.console.runs.run_table import PageView, RunTable
from tokenbus_services.console.runs.run_view import Costs
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SAMPLING_S = 10.0
"""A sample is many commands, and each may wait for a server that does not answer."""
SAMPLE_S = 1.0
HEALTH_S = 1.5
"""At one sample per second, every second one includes health."""


class WatchingPage:
    """One page that watches: the newest sample that it has not had."""

    def __init__(self, view: PageView) -> None:
        self.view = view
        self.pending: dict[str, bytes] = {}
        """By event: what to send next. A slow page misses samples rather than falling behind."""
        self.news = asyncio.Event()
        self.plotted = 0
        """The newest slot of the plots that it got."""

    def put(self, event: str, data: bytes) -> None:
        """Replace the message to send."""
        self.pending[event] = data
        self.news.set()

    def take(self) -> dict[str, bytes]:
        """The message to send now."""
        taken, self.pending = self.pending, {}
        self.news.clear()
        return taken


class Sampler:
    """Serves all pages of one gateway."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        costs: Costs,
        deployment: DeploymentReader,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._keys = keys
        self._runs = RunTable(server, keys, costs, clock=clock)
        self._clock = clock
        self._pages: set[WatchingPage] = set()
        self._deployment = deployment
        self._hour = LastHour(server, keys)
        self._health_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._liveness = Liveness()

    async def open(self, liveness: Liveness) -> None:
        """Nothing happens before the first page."""
        self._liveness = liveness

    async def close(self) -> None:
        await stop_task(self._task)

    def join(self, page: WatchingPage) -> None:
        """Begin to serve a page."""
        self._pages.add(page)
        if self._task is None or self._task.done():
            self._task = self._liveness.start_passing(self._run(), name="samples for the console")

    def leave(self, page: WatchingPage) -> None:
        self._pages.discard(page)

    async def _run(self) -> None:
        """Sample until the last viewer leaves."""
        while self._pages:
            began = self._clock()
            try:
                with translated(self._server), slack(SAMPLING_S):
                    await self.sample()
                self._send_rows(behind_ms=round(1000 * (self._clock() - began)))
                if began >= self._health_at and self._pages:
                    self._health_at = began + HEALTH_S
                    with translated(self._server), slack(SAMPLING_S):
                        await self._send_health()
            except (TokenbusError, RedisError, OSError) as e:
                log.info("console_sample_failed", error=str(e))
            except Exception:  # a defect of the console must not end the gateway, and the page shows that it is behind
                log.exception("console_sample_failed")
                self._liveness.failed_work("console sample")
            await rest(max(0.05, SAMPLE_S - (self._clock() - began)))
        self._runs.clear()

    async def sample(self) -> None:
        """Read what changed. Raises redis-py's errors."""
        await self._runs.sample(self._views)

    def _views(self) -> set[PageView]:
        return {page.view for page in self._pages}

    def _send_rows(self, *, behind_ms: int) -> None:
        by_view: dict[PageView, bytes] = {}
        for page in list(self._pages):
            if page.view not in by_view:
                by_view[page.view] = msgspec.json.encode(self._runs.river(page.view, behind_ms=behind_ms))
            page.put("river", by_view[page.view])

    async def _send_health(self) -> None:
        """Send the deployment's health to viewers who see all of it; a tenant's viewers get their own lane alone."""
        lanes = self._runs.lanes()
        whole = b""
        if any(page.view.scope is None for page in self._pages):
            await self._hour.read()
            health = health_of(await self._deployment.read())
            whole = msgspec.json.encode(msgspec.structs.replace(health, providers=self._hour.providers(), lanes=lanes))
        for page in list(self._pages):
            scope = page.view.scope
            if scope is not None:
                own = [lane for lane in lanes if lane.tenant == scope]
                page.put("health", msgspec.json.encode(Health(lanes=own)))
            elif whole:
                page.put("health", whole)
                self._send_plots(page)

    def _send_plots(self, page: WatchingPage) -> None:
        plots = self._hour.plots(after=page.plotted)
        if plots.points and "plots" not in page.pending:
            page.plotted = self._hour.newest
            page.put("plots", msgspec.json.encode(plots))


# The slots are in Redis, so any gateway shows the same hour, also one that has just started.


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

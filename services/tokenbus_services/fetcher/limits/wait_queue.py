"""A fair queue for provider calls: runs that wait for a slot or a limit take turns by tenant.

Waiting runs are in lanes, one per tenant, provider and set of limits. Tenants take turns, and within a tenant its lanes
do; a lane whose limit refused is skipped until it makes sense to ask again. So a run waits only for its own limits and
its turn, never behind other tenants' backlogs. A run without limits causes no server call here.

If all slots are taken, a tenant or a provider with less than its share of them still enters: half as many slots again
are kept for tenants, and as many for providers. So neither one tenant's calls nor those of one provider, however long
they last, take a fetcher from the others.

A tenant may have as many runs waiting here as there are free places: the dynamic-threshold rule for shared buffers
(Choudhury and Hahne, 1998). However many runs of however many tenants wait, one more tenant finds room.
"""

from __future__ import annotations

import asyncio
import collections
from collections import OrderedDict, deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import IDLE_S, Liveness, beat, slack, stop_task, wait_briefly
from tokenbus.bus.scripts.limits import Kind, Scope
from tokenbus_services.endpoints.limiter import Limiter, LimitRefusal, Reservation, ReservationRequest
from tokenbus_services.runtime.queue_work import NotStarted

_Lane = OrderedDict[tuple[str, tuple[Scope, ...]], "deque[_Waiting]"]
_Kind = Literal["tenant", "provider"]
RESERVE = 0.5
"""Additional slots for tenants, and for providers, as a part of all slots."""


class AdmissionMetrics:
    """Calls granted, and calls refused by kind of limit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.granted = Counter("tokenbus_calls_granted", "Provider calls that got leave.", registry=registry)
        self._refused = Counter(
            "tokenbus_calls_refused",
            "How often a limit delayed a call, by what it limits: model, provider or tenant.",
            ["limit"],
            registry=registry,
        )

    def refused(self, kind: Kind) -> None:
        """Count a refusal by this kind of limit."""
        self._refused.labels(limit=kind).inc()


class WaitedTooLong(Exception):
    """The run's turn did not come within the longest wait."""


class _Waiting:
    """A waiting run, and the future for its reservation."""

    def __init__(self, request: ReservationRequest) -> None:
        self.request = request
        self.granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()


class FairQueue:
    """Call `open`; `enter` before a call and `leave` after it; `close` rejects everything that waits."""

    def __init__(
        self,
        limiter: Limiter,
        metrics: AdmissionMetrics,
        *,
        slots: int,
        places: int,
        longest_wait_s: float,
        liveness: Liveness | None = None,
    ) -> None:
        """``slots``: maximum concurrent calls. ``places``: maximum waiting runs."""
        self._limiter = limiter
        self._metrics = metrics
        self._liveness = liveness or Liveness()
        self._slots = slots
        self._places = places
        self._longest_wait_s = longest_wait_s
        self._running = 0
        self._running_of: dict[_Kind, collections.Counter[str]] = {
            "tenant": collections.Counter(),
            "provider": collections.Counter(),
        }
        self._beyond: dict[_Kind, set[str]] = {"tenant": set(), "provider": set()}
        """Calls that entered although all slots were taken, by whose share let them in."""
        self._waiting: collections.Counter[str] = collections.Counter()
        """By tenant: runs in a lane, and runs on their way into one."""
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()
        """Tenants, next in turn first, each with its lanes in the same order. No tenant and no lane is empty."""
        self._refused_until: dict[Scope, float] = {}
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        """Number of waiting runs."""
        return self._waiting.total()

    @property
    def healthy(self) -> bool:
        """Whether the admission task is alive; without it this worker makes no calls."""
        return self._task is not None and not self._task.done()

    @property
    def full(self) -> bool:
        """Whether all slots are taken."""
        return self._running >= self._slots

    def has_place(self, tenant: str) -> bool:
        """Whether one more run of this tenant may wait here."""
        return self._waiting[tenant] < self._places - self.waiting

    async def open(self) -> None:
        """Start admitting."""
        self._task = self._liveness.start(self._admit(), name="admission")

    async def close(self) -> None:
        """Stop; runs that wait or come later get NotStarted."""
        self._closing.set()
        await stop_task(self._task)
        for lanes in self._lanes.values():
            for lane in lanes.values():
                for waiting in lane:
                    if not waiting.granted.done():
                        waiting.granted.set_exception(NotStarted())

    @contextmanager
    def arriving(self, tenant: str) -> Generator[None]:
        """Count the tenant's run as waiting inside this block."""
        self._waiting[tenant] += 1
        try:
            yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises NotStarted if this fetcher closes meanwhile."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while (left := until - clock()) > 0:
            if await wait_briefly(self._closing, timeout_s=left):
                raise NotStarted

    def enter_at_once(self, request: ReservationRequest) -> Reservation | None:
        """Start a call without waiting; None unless a slot is free, no run waits and no limit applies. End it with
        `leave`.
        """
        if request.scopes or self.full or self._lanes or self._closing.is_set():
            return None
        return self._begin(Reservation(request, ()))

    async def enter(self, request: ReservationRequest) -> Reservation:
        """Wait for this run's turn to call. End it with `leave`.

        Raises WaitedTooLong; NotStarted if this fetcher closes.
        """
        if self._closing.is_set():
            raise NotStarted
        waiting = _Waiting(request)
        self._lanes.setdefault(request.tenant, OrderedDict()).setdefault(_lane_of(request), deque()).append(waiting)
        self._changed.set()
        try:
            with slack(self._longest_wait_s):
                async with process_clock.timeout(self._longest_wait_s):
                    return await waiting.granted
        except BaseException as e:
            granted = waiting.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.leave(granted.result(), used=0)  # granted and cancelled at the same moment
            else:
                self._take_out(waiting)
            if isinstance(e, TimeoutError):
                raise WaitedTooLong from None
            raise

    def leave(self, grant: Reservation, *, used: int | None, wait_s: float | None = None) -> None:
        """End a call. ``used``: tokens it took, None if unknown. ``wait_s``: how long the provider asked to pause."""
        self._running -= 1
        for kind, name in _names(grant.request):
            running = self._running_of[kind]
            running[name] -= 1
            if not running[name]:
                del running[name]
            self._beyond[kind].discard(grant.request.member)
        self._limiter.refund(grant, used)
        if wait_s:
            self._limiter.pause(grant.request, wait_s)
        for scope in grant.request.scopes:
            self._refused_until.pop(scope, None)  # there may be room now
        self._changed.set()

    def _begin(self, grant: Reservation) -> Reservation:
        if self.full and (kind := self._share_left(grant.request)):
            self._beyond[kind].add(grant.request.member)
        self._running += 1
        for kind, name in _names(grant.request):
            self._running_of[kind][name] += 1
        self._metrics.granted.inc()
        return grant

    async def _admit(self) -> None:
        while True:
            beat()
            waiting = self._next()
            if waiting is None:
                await self._wait()
                continue
            if waiting.granted.done():  # cancelled, but its own task has not run since
                self._take_out(waiting)
                continue
            try:
                verdict = await self._limiter.reserve(waiting.request)
            except Exception as e:  # concerns this run's limits only; the others continue
                if not waiting.granted.done():
                    self._take_out(waiting)
                    waiting.granted.set_exception(e)
                continue
            if isinstance(verdict, LimitRefusal):
                self._metrics.refused(verdict.scope.kind)
                self._refused_until[verdict.scope] = asyncio.get_running_loop().time() + verdict.seconds
            elif waiting.granted.done():  # cancelled meanwhile
                self._limiter.refund(verdict, used=0)
            else:
                self._take_out(waiting)
                waiting.granted.set_result(self._begin(verdict))

    def _next(self) -> _Waiting | None:
        """Return the run whose turn it is; move its tenant and its lane to the end. While all slots are taken, only
        those are considered that have less than their share.
        """
        now = asyncio.get_running_loop().time()
        self._refused_until = {scope: until for scope, until in self._refused_until.items() if until > now}
        for tenant, lanes in self._lanes.items():
            for key, lane in lanes.items():
                may_enter = not self.full or self._share_left(lane[0].request)
                if may_enter and not any(scope in self._refused_until for scope in lane[0].request.scopes):
                    self._lanes.move_to_end(tenant)
                    lanes.move_to_end(key)
                    return lane[0]
        return None

    def _share_left(self, request: ReservationRequest) -> _Kind | None:
        """Whose share lets the run enter although all slots are taken: its tenant's, or its provider's.

        A share is an equal part of the slots for each that has calls. One that has no other beside it has none.
        """
        for kind, name in _names(request):
            running = self._running_of[kind]
            others = len(running) - (name in running)
            room = len(self._beyond[kind]) < int(self._slots * RESERVE)
            if others and room and running[name] < max(1, self._slots // (others + 1)):
                return kind
        return None

    async def _wait(self) -> None:
        """Wait until something changes, or a refused limit may be asked again."""
        self._changed.clear()
        now = asyncio.get_running_loop().time()
        until = now + IDLE_S if self.full else min(self._refused_until.values(), default=now + IDLE_S)
        await wait_briefly(self._changed, timeout_s=until - now)

    def _take_out(self, waiting: _Waiting) -> None:
        request = waiting.request
        lanes = self._lanes.get(request.tenant)
        lane = lanes.get(_lane_of(request)) if lanes else None
        if lanes and lane and waiting in lane:
            lane.remove(waiting)
            if not lane:
                del lanes[_lane_of(request)]
            if not lanes:
                del self._lanes[request.tenant]


def _names(request: ReservationRequest) -> tuple[tuple[_Kind, str], tuple[_Kind, str]]:
    """Whose shares of the slots the call takes."""
    return ("tenant", request.tenant), ("provider", request.provider)


def _lane_of(request: ReservationRequest) -> tuple[str, tuple[Scope, ...]]:
    return request.provider, request.scopes

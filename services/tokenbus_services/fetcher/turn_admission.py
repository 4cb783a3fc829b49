"""Admits a turn to its provider: waits until its call may start, then reads what the call needs.

A turn waits for its retry delay, for the policy stage if that lags, and for a slot under the limits. Meanwhile its item
is marked as not begun, so another fetcher can take it over as it is. It begins when its call may start.
"""

from __future__ import annotations

import asyncio
from asyncio import Semaphore
from functools import partial

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import holding
from tokenbus.bus.run_record import (
    DEADLINE,
    HISTORY_BOUND,
    JOB,
    REQUEST,
    history_fields,
    read_attempt,
    so_far_field,
)
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.request.validate import request_for
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ProviderJob, TurnWork, history_decoder, job_decoder
from tokenbus.events.requests import Generate, HistoryBound, Message
from tokenbus.events.sessions import session_run
from tokenbus_services.endpoints.limiter import Reservation, ReservationRequest, Scopes
from tokenbus_services.fetcher.backpressure import Backpressure
from tokenbus_services.fetcher.calls.call_timeouts import DEADLINE_PASSED
from tokenbus_services.fetcher.limits.token_estimate import estimate
from tokenbus_services.fetcher.limits.wait_queue import FairQueue, WaitedTooLong
from tokenbus_services.fetcher.session_history import InSession, Keep, SessionHistory, Summarised

LOOK_S = 1.0
"""How often a run that waits for the policy stage checks whether it still has to wait; it may have ended."""
LOOK_UPS = 32
"""Maximum concurrent request look-ups: each request may be large."""
LONGEST_WAIT = ErrorInfo(code="limit_wait", kind="rate_limit", message="the run's turn did not come in time")

_bound = msgspec.json.Decoder(HistoryBound)
_request_decoder = msgspec.json.Decoder(Generate)


def waits_as(work: TurnWork) -> str:
    """The queue share that a run counts against: its tenant's, or that of the tenant's runs under policies.

    Runs under policies are counted apart. However many of them wait for their policies, there is room for requests that
    the policies themselves publish.
    """
    return f"{work.tenant} held" if work.held else work.tenant


class Turn(msgspec.Struct, frozen=True):
    """The input of an attempt."""

    request: Generate
    history: list[Message]
    """Messages appended by earlier turns."""
    deadline: float | None
    """In the event loop's time."""
    job: ProviderJob | None = None
    """The run's newest job in the background, of whichever turn."""
    notes: tuple[str, ...] = ()
    """On what was left out of the request."""
    summary: Summarised | None = None
    """What of its session's history should be summarised before it is sent."""
    steers: list[Message] = []
    """The messages of its session that went into this turn."""


class NotCalled(Exception):
    """The attempt ends before its provider call."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


class TurnAdmission:
    """Decides when the calls of one fetcher's turns start."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        queue: WorkQueue,
        admission: FairQueue,
        scopes: Scopes,
        *,
        lags: Backpressure,
        keep: Keep,
    ) -> None:
        """``admission``: where turns wait for a slot. ``keep`` keeps the blobs of a session's history."""
        self._server = server
        self._keys = keys
        self._queue = queue
        self._admission = admission
        self._scopes = scopes
        self._lags = lags
        self._history = SessionHistory(server, keys, admission.sleep, keep)
        self._looking_up = LookUps(keys, most=LOOK_UPS, apart=server.topology == "cluster")

    async def admit(self, item: QueueItem, run: str, work: TurnWork) -> tuple[Turn, Reservation] | None:
        """Return the turn once its call may start; None if the attempt is over or another worker owns it.

        Raises NotCalled, NotStarted. While it waits, the item is marked as not begun, and as begun before this returns.
        """
        waits = work.not_before_ms > 0
        if waits:
            await self._queue.mark(item, begun=False)
            await self._delay(run, work)
        if work.held:
            waits = await self._await_policies(item, run, work.attempt, marked=waits)
        turn = await self._look_up(run, work)
        if turn is None:
            return None
        if turn.summary and not turn.history:  # in the first turn alone: a later one would ask what the first did not
            if not waits:
                waits = True
                await self._queue.mark(item, begun=False)
            await self._history.summarise(turn.summary)
            if (turn := await self._look_up(run, work)) is None:
                return None
        request = self._reservation_request(run, work, turn)
        grant = self._admission.enter_at_once(request)
        if grant is None:
            deadline, turn = turn.deadline, None  # free the request's memory while it waits
            if not waits:
                waits = True
                await self._queue.mark(item, begun=False)
            grant = await self._enter(request, deadline)
        ready = None
        try:
            turn = turn or await self._look_up(run, work)
            if turn and await self._queue.mark(item, begun=True):
                ready = turn, grant
        finally:
            if ready is None:
                self._admission.leave(grant, used=0)
        return ready

    async def _await_policies(self, item: QueueItem, run: str, attempt: int, *, marked: bool) -> bool:
        """Wait while the policy stage lags too far behind for another run; holds no slot meanwhile.

        Returns whether the item is now marked as not begun. Raises NotStarted.
        """
        look = partial(self._lags.holds_back, run, attempt)
        behind = await retry_until_available(self._server, lambda: look(waits=False), what="lag of the policy stage")
        while behind:
            if not marked:
                marked = True
                await self._queue.mark(item, begun=False)
            await self._admission.sleep(LOOK_S)
            behind = await retry_until_available(self._server, lambda: look(waits=True), what="lag of the policy stage")
        return marked

    async def _enter(self, request: ReservationRequest, deadline: float | None) -> Reservation:
        """Wait for the run's turn. Raises NotCalled, NotStarted."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admission.enter(request)
        except TimeoutError:
            raise NotCalled(DEADLINE_PASSED) from None
        except WaitedTooLong:
            raise NotCalled(LONGEST_WAIT) from None

    def _reservation_request(self, run: str, work: TurnWork, turn: Turn) -> ReservationRequest:
        request, tenant = turn.request, tenant_of(turn.request.metadata)
        scopes = self._scopes.of(request.provider, request.model, tenant)
        limited = any(scope.tokens_per_minute for scope in scopes)
        return ReservationRequest(
            f"{run}/{work.attempt}",
            tenant,
            scopes,
            estimate(request, turn.history) if limited else 0,
            request.provider,
        )

    async def _delay(self, run: str, work: TurnWork) -> None:
        """Wait for the retry delay, or until the run's deadline if that comes first."""
        deadline = await retry_until_available(
            self._server,
            lambda: self._server.client.hget(self._keys.run(run), DEADLINE),
            what="look-up of a deadline",
        )
        until_ms = min(work.not_before_ms, int(deadline)) if deadline else work.not_before_ms
        await self._admission.sleep((until_ms - self._server.clock.now_ms()) / 1000)

    async def _look_up(self, run: str, work: TurnWork) -> Turn | None:
        """Read the turn from the run's hash; None if the attempt is over."""
        key = self._keys.run(run)
        more = [REQUEST, DEADLINE, JOB, HISTORY_BOUND, so_far_field(work.attempt), *history_fields(work.turn)]
        of = session_run(run)
        async with holding(self._looking_up.of(run)):
            reading = retry_until_available(
                self._server,
                lambda: read_attempt(self._server.client, key, work.attempt, more),
                what="look-up of a run",
            )
            record, newest = await asyncio.gather(reading, self._history.newest(of)) if of else (await reading, None)
        stored, deadline_ms, job, bound, so_far, *turns = record.more
        if not record.is_open or stored is None:
            return None
        request = request_for(_request_decoder.decode(stored), work.choice)
        in_session = InSession(request, [])
        if of and newest:
            async with holding(self._looking_up.of(run)):
                in_session = await self._history.before(request, of, _bound.decode(bound) if bound else None, newest)
        history: list[Message] = []
        steers = [message for turn, steering in in_session.steers for message in steering if turn == work.turn]
        for n, messages in enumerate([None, *turns]):
            history += history_decoder.decode(messages) if messages else []
            history += [message for turn, steering in in_session.steers for message in steering if turn == n]
        if so_far is not None:
            history += history_decoder.decode(so_far)
        deadline = None
        if deadline_ms:
            deadline = asyncio.get_running_loop().time() + (int(deadline_ms) - self._server.clock.now_ms()) / 1000
        job_of_run = job_decoder.decode(job) if job else None
        return Turn(in_session.request, history, deadline, job_of_run, in_session.notes, in_session.summary, steers)


class LookUps:
    """In a Cluster each partition has places of its own, because its node may be away. Their number follows the
    partitions: what still looks up when it changes keeps its old place.
    """

    def __init__(self, keys: Keys, *, most: int, apart: bool) -> None:
        """``most``: maximum look-ups over all partitions, but at least one in each. ``apart``: the server is a
        Cluster.
        """
        self._keys = keys
        self._most = most
        self._apart = apart
        self._places: list[Semaphore] = []

    def of(self, run: str) -> Semaphore:
        """The places of this run's partition."""
        number = self._keys.partitions if self._apart else 1
        if len(self._places) != number:
            self._places = [Semaphore(max(1, self._most // number)) for _ in range(number)]
        return self._places[self._keys.partition_of(run) % number]

"""Makes provider attempts: each item of the `turns` queue is one attempt of one run.

If another worker had already begun an item, it is not retried here: its attempt is closed as lost, and the parser
decides on the next one. So an attempt only ever has one fetcher. A run that was only waiting, for a slot or for its
retry delay, is taken over as it is: it loses nothing, however many fetchers die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial

import msgspec
import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import holding, slack
from tokenbus.bus.run_record import DEADLINE, REQUEST, history_fields, read_attempt, so_far_field
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.core.request.fallback_request import request_for
from tokenbus.core.request.tenant import tenant_of
from tokenbus.errors import AttemptRefused, RequestError, SettingsError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Ended, Noted, TurnWork, history_decoder, turn_decoder
from tokenbus.events.requests import Generate, Message
from tokenbus.providers.api import HttpCall
from tokenbus_services.fetcher.attempt_writer import AttemptWriter
from tokenbus_services.fetcher.call_spans import CallFacts, CallSpans
from tokenbus_services.fetcher.call_timeouts import DEADLINE_PASSED
from tokenbus_services.fetcher.endpoints import Endpoint, Providers
from tokenbus_services.fetcher.image_offload.offload import ImageStore
from tokenbus_services.fetcher.limits.limiter import Reservation, ReservationRequest
from tokenbus_services.fetcher.limits.scopes import Scopes
from tokenbus_services.fetcher.limits.token_estimate import TokenTally, estimate
from tokenbus_services.fetcher.limits.wait_queue import FairQueue, WaitedTooLong
from tokenbus_services.fetcher.look_ups import LookUps
from tokenbus_services.fetcher.provider_call import CallOptions, CredentialsRejected, FilesLost, fetch
from tokenbus_services.fetcher.raw_writer import RawWriter
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.fetcher.silent_calls import SilentCalls
from tokenbus_services.fetcher.uploads.upload import UploadFailed
from tokenbus_services.media.body import MediaBody
from tokenbus_services.media.errors import MediaFailed

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOOK_S = 1.0
"""How often a run that waits for the policy stage checks whether it still has to wait; it may have ended."""
MEDIA_S = 60.0
"""How long finding a turn's media and uploading them to its provider may go without progress: a piece of a blob, or a
step of an upload (`uploads.flight`).
"""
LOOK_UPS = 32
"""Maximum concurrent request look-ups: each request may be large."""
LONGEST_WAIT = ErrorInfo(code="limit_wait", kind="rate_limit", message="the run's turn did not come in time")

_request_decoder = msgspec.json.Decoder(Generate)


def waits_as(work: TurnWork) -> str:
    """The queue share that a run counts against: its tenant's, or that of the tenant's runs under policies.

    Runs under policies are counted apart. However many of them wait for their policies, there is room for requests that
    the policies themselves publish.
    """
    return f"{work.tenant} held" if work.held else work.tenant


class _Turn(msgspec.Struct, frozen=True):
    """The input of an attempt."""

    request: Generate
    history: list[Message]
    """Messages appended by earlier turns."""
    deadline: float | None
    """In the event loop's time."""


class _NotCalled(Exception):
    """The attempt ends before its provider call."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


class AttemptRunner:
    """Makes the attempts that items of the `turns` queue ask for."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        queue: WorkQueue,
        writer: RawWriter,
        providers: Providers,
        *,
        media: TurnMedia,
        admission: FairQueue,
        scopes: Scopes,
        images: ImageStore,
        answer_bytes: int,
        stop: Callable[[QueueItem], None],
        silent: SilentCalls | None = None,
        spans: CallSpans | None = None,
    ) -> None:
        """``images``: where images of answers are stored. ``answer_bytes``: maximum size of one answer. ``stop`` ends
        the work on an item whose attempt the server no longer accepts. ``silent``: is told
        of calls without an answer.
        """
        self._server = server
        self._keys = keys
        self._queue = queue
        self._writer = writer
        self._providers = providers
        self._media = media
        self._admission = admission
        self._scopes = scopes
        self._images = images
        self._answer_bytes = answer_bytes
        self._stop = stop
        self._silent = silent
        self._spans = spans
        self._looking_up = LookUps(keys, most=LOOK_UPS, apart=server.topology == "cluster")

    async def work(self, item: QueueItem) -> None:
        """Make the attempt and run it to its end."""
        for name, data in item.fields.items():
            await self._attempt(name.decode(), turn_decoder.decode(data), item)

    async def abandon(self, item: QueueItem) -> None:
        """Close the attempt as lost, so that another attempt can follow."""
        await self.close(item, "the fetcher stopped")
        await self._queue.finish([item], again=lambda: self.close(item))

    async def close(self, item: QueueItem, reason: str = "the server forgot how it ended") -> None:
        """Close the attempt. Does nothing if it has ended already."""
        for name, data in item.fields.items():
            work = turn_decoder.decode(data)
            await self._writer.lost(name.decode(), work.turn, work.attempt, reason)

    async def _attempt(self, run: str, work: TurnWork, item: QueueItem) -> None:
        if item.deliveries > 1:
            log.info("attempt_lost", run=run, turn=work.turn, attempt=work.attempt)
            await self._writer.lost(run, work.turn, work.attempt, "the fetcher was lost")
            return
        writer = self._writer.attempt(run, work.turn, work.attempt, lambda _: self._stop(item), held=work.held)
        try:
            try:
                with self._admission.arriving(waits_as(work)):
                    ready = await self._ready(item, run, work)
            except _NotCalled as e:
                await writer.end(Ended(e.error))
                return
            if ready:
                if self._spans:
                    self._record_wait(run, work, item, ready[0])
                await self._call(*ready, writer)
        except AttemptRefused as e:
            log.info("attempt_refused", run=run, turn=work.turn, attempt=work.attempt, reason=e.reason)

    def _record_wait(self, run: str, work: TurnWork, item: QueueItem, turn: _Turn) -> None:
        assert self._spans
        clock = self._server.clock
        since_ms = clock.ms_of(id_key(item.entry_id)[0])
        self._spans.waited(
            *(turn.request, run), turn=work.turn, attempt=work.attempt, since_ms=since_ms, until_ms=clock.now_ms()
        )

    async def _ready(self, item: QueueItem, run: str, work: TurnWork) -> tuple[_Turn, Reservation] | None:
        """Return the turn once its call may start; None if the attempt is over or another worker owns it.

        Raises _NotCalled, NotStarted. While it waits, the item is marked as not begun.
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
        ask = self._ask(run, work, turn)
        grant = self._admission.enter_at_once(ask)
        if grant is None:
            deadline, turn = turn.deadline, None  # free the request's memory while it waits
            if not waits:
                waits = True
                await self._queue.mark(item, begun=False)
            grant = await self._enter(ask, deadline)
        ready = None
        try:
            if not waits or await self._queue.mark(item, begun=True):
                turn = turn or await self._look_up(run, work)
                ready = turn and (turn, grant)
        finally:
            if ready is None:
                self._admission.leave(grant, used=0)
        return ready

    async def _await_policies(self, item: QueueItem, run: str, attempt: int, *, marked: bool) -> bool:
        """Wait while the policy stage lags too far behind for another run; holds no slot meanwhile.

        Returns whether the item is now marked as not begun. Raises NotStarted.
        """
        look = partial(self._writer.lags.holds_back, run, attempt)
        behind = await retry_until_available(self._server, lambda: look(waits=False), what="lag of the policy stage")
        while behind:
            if not marked:
                marked = True
                await self._queue.mark(item, begun=False)
            await self._admission.sleep(LOOK_S)
            behind = await retry_until_available(self._server, lambda: look(waits=True), what="lag of the policy stage")
        return marked

    async def _enter(self, ask: ReservationRequest, deadline: float | None) -> Reservation:
        """Wait for the run's turn. Raises _NotCalled, NotStarted."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admission.enter(ask)
        except TimeoutError:
            raise _NotCalled(DEADLINE_PASSED) from None
        except WaitedTooLong:
            raise _NotCalled(LONGEST_WAIT) from None

    def _ask(self, run: str, work: TurnWork, turn: _Turn) -> ReservationRequest:
        request, tenant = turn.request, tenant_of(turn.request.metadata)
        scopes = self._scopes.of(request.provider, request.model, tenant)
        limited = any(scope.tokens_per_minute for scope in scopes)
        return ReservationRequest(
            f"{run}/{work.attempt}", tenant, scopes, estimate(request, turn.history) if limited else 0
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

    async def _call(self, turn: _Turn, grant: Reservation, writer: AttemptWriter) -> None:
        """Make the call, then refund the unused part of its reservation."""
        tally = TokenTally() if grant.request.scopes else None
        whole = False
        log.info(
            "attempt_started",
            run=writer.run,
            turn=writer.turn,
            attempt=writer.attempt,
            provider=turn.request.provider,
            model=turn.request.model,
        )
        try:
            for_attempt = (
                self._spans.attempt(turn.request, writer.run, writer.attempt) if self._spans else nullcontext()
            )
            with for_attempt:
                await self._make(turn, writer, tally)
            whole = True
        finally:
            # The parser may end the run, and with it this call, before the provider has closed the body.
            used = tally.used if tally and (whole or tally.final_count) else None
            wait_s = tally.error.retry_after_s if tally and tally.error else None
            self._admission.leave(grant, used=used, wait_s=wait_s)

    async def _make(self, turn: _Turn, writer: AttemptWriter, tally: TokenTally | None) -> None:
        """Make the call; repeat it without files that the provider no longer has, or with new credentials."""
        lost: tuple[str, ...] = ()
        rejected, calls = False, 0
        while ready := await self._built(turn, writer, lost, again=rejected):
            endpoint, call, body = ready
            calls += 1
            facts = CallFacts(self._server.clock.now_ms) if self._spans else None
            try:
                await fetch(
                    endpoint,
                    turn.request,
                    call,
                    body,
                    writer=writer,
                    deadline=turn.deadline,
                    options=CallOptions(
                        tally=tally,
                        images=self._images,
                        answer_bytes=self._answer_bytes,
                        again=not rejected,
                        called_ms=self._server.clock.now_ms(),
                        facts=facts,
                        silent=self._silent,
                    ),
                )
            except CredentialsRejected:
                rejected = True
            except FilesLost as e:
                lost = e.file_ids
            else:
                return
            finally:
                if self._spans and facts:
                    facts.ended_ms = facts.ended_ms or self._server.clock.now_ms()
                    self._spans.called(
                        *(turn.request, turn.history, writer.run),
                        turn=writer.turn,
                        attempt=writer.attempt,
                        n=calls,
                        facts=facts,
                    )

    async def _built(
        self, turn: _Turn, writer: AttemptWriter, lost: Collection[str], *, again: bool
    ) -> tuple[Endpoint, HttpCall, MediaBody | None] | None:
        """Build the call; None if the attempt ended with an error instead."""
        request = turn.request
        try:
            endpoint: Endpoint = self._providers.get(request.provider)
            with slack(MEDIA_S):
                async with asyncio.timeout_at(turn.deadline):
                    built, body = await self._media.build(endpoint, request, turn.history, lost=lost)
        except TimeoutError:
            await writer.end(Ended(DEADLINE_PASSED))
            return None
        except (MediaFailed, UploadFailed) as e:
            await writer.end(Ended(e.error))
            return None
        except (RequestError, SettingsError) as e:
            where = getattr(e, "where", None)
            await writer.end(Ended(ErrorInfo(code=e.code, kind="invalid_request", message=str(e), where=where)))
            return None
        if lost:  # a second failure of any kind is passed on
            return endpoint, msgspec.structs.replace(built.call, files=()), body
        for note in () if again else built.notes:
            await writer.write(Noted(note))
        return endpoint, built.call, body

    async def _look_up(self, run: str, work: TurnWork) -> _Turn | None:
        """Read the turn from the run's hash; None if the attempt is over."""
        key = self._keys.run(run)
        more = [REQUEST, DEADLINE, so_far_field(work.attempt), *history_fields(work.turn)]
        async with holding(self._looking_up.of(run)):
            record = await retry_until_available(
                self._server,
                lambda: read_attempt(self._server.client, key, work.attempt, more),
                what="look-up of a run",
            )
        request, deadline_ms, so_far, *turns = record.more
        if not record.is_open or request is None:
            return None
        history = [m for t in turns if t for m in history_decoder.decode(t)]
        if so_far is not None:
            history += history_decoder.decode(so_far)
        deadline = None
        if deadline_ms:
            deadline = asyncio.get_running_loop().time() + (int(deadline_ms) - self._server.clock.now_ms()) / 1000
        return _Turn(request_for(_request_decoder.decode(request), work.choice), history, deadline)

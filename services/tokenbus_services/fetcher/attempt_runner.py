"""Makes provider attempts: each item of the `turns` queue is one attempt of one run.

If another worker had already begun an item, it is not retried here: its attempt is closed as lost, and the parser
decides on the next one. So an attempt only ever has one fetcher. An attempt begins before its call or its end is
written. One that has not begun is taken over as it is: it loses nothing, however its fetcher ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import msgspec
import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import slack
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.client.sessions.history import waiting_steers
from tokenbus.errors import AttemptRefused, RequestError, SettingsError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Ended, Noted, ProviderJob, TurnWork, turn_decoder
from tokenbus.events.requests import Message
from tokenbus.events.sessions import session_run
from tokenbus.providers.api import HttpCall
from tokenbus_services.endpoints.endpoint import Endpoint, Providers
from tokenbus_services.endpoints.limiter import Reservation, Scopes
from tokenbus_services.fetcher.calls.background_job import MOST_TAKEN, LeftJobs, RunningJob
from tokenbus_services.fetcher.calls.call_spans import CallFacts, CallSpans
from tokenbus_services.fetcher.calls.call_timeouts import DEADLINE_PASSED, SilentCalls
from tokenbus_services.fetcher.calls.provider_call import CredentialsRejected, FilesLost, fetch
from tokenbus_services.fetcher.calls.response_relay import CallOptions
from tokenbus_services.fetcher.calls.steered_call import SteeredCall, SteeredCalls
from tokenbus_services.fetcher.image_offload import ImageStore
from tokenbus_services.fetcher.limits.token_estimate import TokenTally
from tokenbus_services.fetcher.limits.wait_queue import FairQueue
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.fetcher.session_history import Keep
from tokenbus_services.fetcher.turn_admission import NotCalled, Turn, TurnAdmission, waits_as
from tokenbus_services.fetcher.uploads.upload import UploadFailed
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.fetcher.writing.raw_writer import RawWriter
from tokenbus_services.media.locate import MediaBody, MediaFailed
from tokenbus_services.settings import RetrySettings
from tokenbus_services.telemetry import NO_TRACER, RunTracer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MEDIA_S = 60.0
"""How long finding a turn's media and uploading them to its provider may go without progress: a piece of a blob, or a
step of an upload (`uploads.flight`).
"""


MOST_DELIVERIES = 2
"""An attempt that has not begun although two fetchers were lost with it is closed: it may be what kills them. One that
waits for its turn is not counted.
"""


def is_lost(item: QueueItem) -> bool:
    """Whether the attempt must not be made here, because another worker had begun it or it may kill its workers."""
    return item.begun or item.deliveries > MOST_DELIVERIES


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
        left: LeftJobs,
        keep: Keep,
        retry: RetrySettings,
        silent: SilentCalls | None = None,
        tracer: RunTracer = NO_TRACER,
    ) -> None:
        """``images``: where images of answers are stored. ``answer_bytes``: maximum size of one answer. ``stop`` ends
        the work on an item whose attempt the server no longer accepts. ``left`` gets jobs that are not read to
        their end. ``keep`` keeps the blobs of a session's history. ``silent`` counts calls without an answer.
        """
        self._server = server
        self._keys = keys
        self._queue = queue
        self._writer = writer
        self._providers = providers
        self._media = media
        self._admission = admission
        self._images = images
        self._answer_bytes = answer_bytes
        self._stop = stop
        self._left = left
        self._retry = retry
        self._silent = silent
        self._tracer = tracer
        self._spans = CallSpans(tracer)
        self.steered = SteeredCalls(self._waiting_steers)
        self._turns = TurnAdmission(server, keys, queue, admission, scopes, lags=writer.lags, keep=keep)

    async def work(self, item: QueueItem) -> None:
        """Make the attempt and run it to its end."""
        for name, data in item.fields.items():
            await self._attempt(name.decode(), turn_decoder.decode(data), item)

    async def abandon(self, item: QueueItem) -> None:
        """Hand over a job in the background; close any other attempt as lost, so that another attempt can follow."""
        if await self._has_job(item):
            await self._queue.hand_back([item])
            return
        await self.close(item, "the fetcher stopped")
        await self._queue.finish([item], again=lambda: self.close(item))

    async def close(self, item: QueueItem, reason: str = "the server forgot how it ended") -> None:
        """Close the attempt. Does nothing if it has ended already."""
        for name, data in item.fields.items():
            work = turn_decoder.decode(data)
            await self._writer.lost(name.decode(), work.turn, work.attempt, reason)

    async def _has_job(self, item: QueueItem) -> bool:
        """Whether another fetcher can go on with this attempt, because it has a job at its provider."""
        works = [(name.decode(), turn_decoder.decode(data)) for name, data in item.fields.items()]
        return all([await self._left.job_of(run, work.attempt) for run, work in works])

    async def _attempt(self, run: str, work: TurnWork, item: QueueItem) -> None:
        if is_lost(item) and (item.deliveries > MOST_DELIVERIES or not await self._has_job(item)):
            log.info("attempt_lost", run=run, turn=work.turn, attempt=work.attempt)
            await self._writer.lost(run, work.turn, work.attempt, "the fetcher was lost")
            await self._left.look(run)
            return
        writer = self._writer.attempt(run, work.turn, work.attempt, lambda _: self._stop(item), held=work.held)
        try:
            try:
                with self._admission.arriving(waits_as(work)):
                    ready = await self._turns.admit(item, run, work)
            except NotCalled as e:
                if await self._queue.mark(item, begun=True):
                    await writer.end(Ended(e.error))
                return
            if ready:
                clock = self._server.clock
                since_ms = clock.ms_of(id_key(item.entry_id)[0])
                self._spans.waited(ready[0].request, writer, since_ms=since_ms, until_ms=clock.now_ms())
                await self._call(*ready, writer, work)
            else:
                await self._left.look(run)
        except AttemptRefused as e:
            log.info("attempt_refused", run=run, turn=work.turn, attempt=work.attempt, reason=e.reason)

    async def _call(self, turn: Turn, grant: Reservation, writer: AttemptWriter, work: TurnWork) -> None:
        """Make the call, then refund the unused part of its reservation."""
        if (added_ms := turn.request.max_added_ms) is not None:
            writer.max_added_s = added_ms / 1000
        tally = TokenTally() if grant.request.scopes else None
        job = None
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
            with self._tracer.working(writer.run, turn.request.traceparent, "attempt", writer.attempt):
                job = await self._job(turn, writer, work)
                if job and job.taken:
                    tally = None  # it can count only whole answers
                await self._make(turn, writer, work, tally, job)
            whole = True
        finally:
            if job and job.known and not job.job.over:
                self._left.left(writer.run, job.job)
            # The parser may end the run, and with it this call, before the provider has closed the body.
            used = tally.used if tally and (whole or tally.final_count) else None
            wait_s = tally.error.retry_after_s if tally and tally.error else None
            self._admission.leave(grant, used=used, wait_s=wait_s)

    async def _job(self, turn: Turn, writer: AttemptWriter, work: TurnWork) -> RunningJob | None:
        """The job in the background of this turn: the one that runs already, or one that its call will start."""
        request, job = turn.request, turn.job
        try:
            api = self._providers.get(request.provider).api.jobs
        except SettingsError:
            return None  # what the call reports
        if (job and (job.turn, job.choice) != (work.turn, work.choice)) or api is None or not api.wanted(request):
            if job and not job.over:
                self._left.drop(writer.run, job)
            job = None
        if api is None or not api.wanted(request):
            return None
        if job and job.attempt == work.attempt:
            if (taken := await self._writer.take_job(writer)) is None:
                raise AttemptRefused(writer.run, writer.attempt, "over")
            job, times = taken
            if times > MOST_TAKEN:
                await self._writer.lost(writer.run, writer.turn, writer.attempt, "its fetchers were lost with its job")
                raise AttemptRefused(writer.run, writer.attempt, "lost")
            return RunningJob(api, job, opened=True)
        if job and not job.over:
            return RunningJob(api, msgspec.structs.replace(job, attempt=work.attempt, after=-1, moved=""))
        now_ms = self._server.clock.now_ms()
        about = (work.turn, work.attempt, work.choice, request.provider, request.model, request.stream, now_ms)
        return RunningJob(api, ProviderJob("", *about))

    async def _make(
        self, turn: Turn, writer: AttemptWriter, work: TurnWork, tally: TokenTally | None, job: RunningJob | None
    ) -> None:
        """Make the call; repeat it without files that the provider no longer has, or with new credentials. Read on if
        its job runs already.
        """
        if job and job.known:
            options = self._options(CallFacts(self._server.clock.now_ms), tally, job)
            endpoint = self._providers.get(turn.request.provider)
            await fetch(endpoint, turn.request, None, writer=writer, deadline=turn.deadline, options=options)
            return
        with self._steering(turn, writer, work, job) as steered:
            await self._make_calls(turn, writer, tally, job, steered)

    def _steering(
        self, turn: Turn, writer: AttemptWriter, work: TurnWork, job: RunningJob | None
    ) -> AbstractContextManager[SteeredCall | None]:
        """The WebSocket over which messages of the session steer the turn, if its provider has that."""
        request = turn.request
        try:
            endpoint = self._providers.get(request.provider)
        except SettingsError:
            return nullcontext()  # what the call reports
        if not endpoint.settings.steering or job or not request.stream or session_run(writer.run) is None:
            return nullcontext()
        place = (work.turn, work.attempt, work.choice)
        return self.steered.call(endpoint, request, writer.run, place, turn.steers)

    async def _make_calls(
        self,
        turn: Turn,
        writer: AttemptWriter,
        tally: TokenTally | None,
        job: RunningJob | None,
        steered: SteeredCall | None,
    ) -> None:
        lost: tuple[str, ...] = ()
        rejected, calls = False, 0
        while ready := await self._built(turn, writer, lost, again=rejected):
            endpoint, call, body = ready
            calls += 1
            facts = CallFacts(self._server.clock.now_ms)
            try:
                await fetch(
                    endpoint,
                    turn.request,
                    call,
                    body,
                    writer=writer,
                    deadline=turn.deadline,
                    options=self._options(facts, tally, job, again=not rejected, steered=None if body else steered),
                )
            except CredentialsRejected:
                rejected = True
            except FilesLost as e:
                lost = e.file_ids
            else:
                return
            finally:
                facts.ended_ms = facts.ended_ms or self._server.clock.now_ms()
                self._spans.called(turn.request, turn.history, writer, n=calls, facts=facts)

    async def _waiting_steers(self, run: str) -> list[Message]:
        if (of := session_run(run)) is None:
            return []
        return await retry_until_available(
            self._server, lambda: waiting_steers(self._server, self._keys, of), what="messages that steer"
        )

    def _options(
        self,
        facts: CallFacts,
        tally: TokenTally | None,
        job: RunningJob | None,
        *,
        again: bool = True,
        steered: SteeredCall | None = None,
    ) -> CallOptions:
        return CallOptions(
            steered=steered,
            tally=tally,
            images=self._images,
            answer_bytes=self._answer_bytes,
            again=again,
            called_ms=facts.called_ms,
            facts=facts,
            job=job,
            retry=self._retry,
            now_ms=self._server.clock.now_ms,
            silent=self._silent,
        )

    async def _built(
        self, turn: Turn, writer: AttemptWriter, lost: Collection[str], *, again: bool
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
        for note in () if again else (*turn.notes, *built.notes):
            await writer.write(Noted(note))
        return endpoint, built.call, body

"""Makes provider attempts: each item of the `turns` queue is one attempt of one run.

If another worker had already begun an item, it is not retried here: its attempt is closed as lost, and the parser
decides on the next one. So an attempt only ever has one fetcher. An attempt begins before its call or its end is
written. One that has not begun is taken over as it is: it loses nothing, however its fetcher ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec
import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import slack
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.errors import AttemptRefused, RequestError, SettingsError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Ended, Noted, TurnWork, turn_decoder
from tokenbus.providers.api import HttpCall
from tokenbus_services.endpoints.endpoint import Endpoint, Providers
from tokenbus_services.fetcher.calls.call_spans import CallFacts, CallSpans
from tokenbus_services.fetcher.calls.call_timeouts import DEADLINE_PASSED
from tokenbus_services.fetcher.calls.provider_call import CredentialsRejected, FilesLost, fetch
from tokenbus_services.fetcher.calls.response_relay import CallOptions
from tokenbus_services.fetcher.calls.silent_calls import SilentCalls
from tokenbus_services.fetcher.image_offload.offload import ImageStore
from tokenbus_services.fetcher.limits.limiter import Reservation, Scopes
from tokenbus_services.fetcher.limits.token_estimate import TokenTally
from tokenbus_services.fetcher.limits.wait_queue import FairQueue
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.fetcher.turn_admission import NotCalled, Turn, TurnAdmission, waits_as
from tokenbus_services.fetcher.uploads.upload import UploadFailed
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.fetcher.writing.raw_writer import RawWriter
from tokenbus_services.media.body import MediaBody, MediaFailed
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
        silent: SilentCalls | None = None,
        tracer: RunTracer = NO_TRACER,
    ) -> None:
        """``images``: where images of answers are stored. ``answer_bytes``: maximum size of one answer. ``stop`` ends
        the work on an item whose attempt the server no longer accepts. ``silent`` counts calls without an answer.
        """
        self._server = server
        self._queue = queue
        self._writer = writer
        self._providers = providers
        self._media = media
        self._admission = admission
        self._images = images
        self._answer_bytes = answer_bytes
        self._stop = stop
        self._silent = silent
        self._tracer = tracer
        self._spans = CallSpans(tracer)
        self._turns = TurnAdmission(server, keys, queue, admission, scopes, lags=writer.lags)

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
        if is_lost(item):
            log.info("attempt_lost", run=run, turn=work.turn, attempt=work.attempt)
            await self._writer.lost(run, work.turn, work.attempt, "the fetcher was lost")
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
                await self._call(*ready, writer)
        except AttemptRefused as e:
            log.info("attempt_refused", run=run, turn=work.turn, attempt=work.attempt, reason=e.reason)

    async def _call(self, turn: Turn, grant: Reservation, writer: AttemptWriter) -> None:
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
            with self._tracer.working(writer.run, turn.request.traceparent, "attempt", writer.attempt):
                await self._make(turn, writer, tally)
            whole = True
        finally:
            # The parser may end the run, and with it this call, before the provider has closed the body.
            used = tally.used if tally and (whole or tally.final_count) else None
            wait_s = tally.error.retry_after_s if tally and tally.error else None
            self._admission.leave(grant, used=used, wait_s=wait_s)

    async def _make(self, turn: Turn, writer: AttemptWriter, tally: TokenTally | None) -> None:
        """Make the call; repeat it without files that the provider no longer has, or with new credentials."""
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
                    options=CallOptions(
                        tally=tally,
                        images=self._images,
                        answer_bytes=self._answer_bytes,
                        again=not rejected,
                        called_ms=facts.called_ms,
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
                facts.ended_ms = facts.ended_ms or self._server.clock.now_ms()
                self._spans.called(turn.request, turn.history, writer, n=calls, facts=facts)

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
        for note in () if again else built.notes:
            await writer.write(Noted(note))
        return endpoint, built.call, body

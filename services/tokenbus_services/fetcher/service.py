"""One fetcher: its queues, its writer and its attempts, opened and closed in an order that loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import msgspec

from tokenbus.bus.control import ControlListener
from tokenbus.bus.keys import Keys, partition_in
from tokenbus.bus.liveness import rest
from tokenbus.bus.run_record import SESSION_LIVES
from tokenbus.bus.stage.chain import Chain
from tokenbus.bus.work_queue import QueueItem, QueueOptions, WorkQueue
from tokenbus.events.frames import Control, turn_decoder
from tokenbus.events.requests import Tool
from tokenbus_services.blobs.client import loader_of
from tokenbus_services.endpoints.endpoint import Providers
from tokenbus_services.endpoints.limiter import Limiter, Scopes
from tokenbus_services.fetcher.attempt_runner import AttemptRunner, is_lost
from tokenbus_services.fetcher.calls.background_job import LeftJobs
from tokenbus_services.fetcher.calls.call_timeouts import SilentCalls
from tokenbus_services.fetcher.image_offload import ImageStore
from tokenbus_services.fetcher.limits.wait_queue import RESERVE, AdmissionMetrics, FairQueue
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.fetcher.turn_admission import waits_as
from tokenbus_services.fetcher.uploads.plan import UploadMetrics, Uploads
from tokenbus_services.fetcher.uploads.upload import UploadedFiles
from tokenbus_services.fetcher.writing.raw_writer import RawWriter
from tokenbus_services.intake.accept import Intake
from tokenbus_services.intake.blob_offload import IntakeMedia
from tokenbus_services.intake.run_creation import Cancels
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.runtime.metrics import KnownModels
from tokenbus_services.runtime.queue_work import InFlight, dead_letter_run
from tokenbus_services.runtime.task_failures import LoggedTasks
from tokenbus_services.runtime.worker_core import WorkerCore

INTAKE_GROUP = "intake"
TURNS_GROUP = "fetcher"
INTAKE_COUNT = 16
"""Requests accepted together: each may have `limits.request_bytes` and is in memory more than once meanwhile."""
STILL_S = 45.0
"""An attempt without progress for this long beyond the timeouts of its current step is stuck."""
TURNED_AWAY_S = 0.002
"""Pause per item that is requeued for lack of room: a deep queue is scanned at up to 500 items per second, which
costs a few hundredths of a core.
"""


class FetcherService:
    """Intake and provider calls in one process."""

    name = "fetcher"

    def __init__(
        self,
        core: WorkerCore,
        tools: Sequence[Tool],
        metrics: AdmissionMetrics,
        uploads: UploadMetrics,
        *,
        prefers: Callable[[int], bool] | None = None,
    ) -> None:
        """``prefers``: whether this worker should make the attempts of a partition; those of the others only if no
        other worker takes them at once. None: all.
        """
        self._core = core
        self._settings = settings = core.settings
        keys = settings.keys
        self._server = server = core.server
        self.liveness = liveness = core.liveness
        worker = core.worker
        self._providers = Providers(settings)
        self._blobs = RecentBlobs(loader_of(settings.blobs), settings.blobs.cache_bytes)
        self._writer = RawWriter(
            server,
            keys,
            linger_s=settings.stages.linger_ms / 1000,
            max_added_s=settings.stages.max_added_ms / 1000,
            lag_bytes=settings.limits.lag_bytes,
            liveness=liveness,
        )
        self._requests = WorkQueue(
            server,
            QueueOptions(  # of an item that another worker claims, the accepting script has decided already
                group=INTAKE_GROUP,
                worker=worker,
                members=keys.members(INTAKE_GROUP),
                count=INTAKE_COUNT,
                fair="requests",
                urgent=self._cancel,
                unreadable=self._unreadable_request,
            ),
            [keys.requests],
            liveness=liveness,
        )
        limits = settings.limits
        self._limiter = Limiter(server, worker=worker, liveness=liveness)
        self.admission = FairQueue(
            self._limiter,
            metrics,
            slots=limits.runs_per_fetcher,
            places=limits.waiting_per_fetcher,
            longest_wait_s=limits.longest_wait_s,
            liveness=liveness,
        )
        self._queue = WorkQueue(
            server,
            QueueOptions(
                group=TURNS_GROUP,
                worker=worker,
                members=keys.members(TURNS_GROUP),
                fair="turns",
                idle_only=lambda: self.admission.full,
                prefers=None if prefers is None else lambda stream: prefers(partition_in(stream) or 0),
                on_claimed_away=self._on_claimed_away,
                unreadable=self._poisoned,
            ),
            _turns(keys),
            keys=keys,
            liveness=liveness,
        )
        self._cancels = Cancels(server, keys, self._requests, liveness)
        media = IntakeMedia(
            self._blobs,
            inline_characters=settings.blobs.inline_characters,
            session_s=SESSION_LIVES * settings.retention.session_s,
        )
        self._intake = Intake(
            server,
            settings,
            self._requests,
            self._cancels,
            providers=self._providers.get,
            tools=tools,
            media=media,
            tracer=core.tracer,
        )
        self._silent = SilentCalls(server, keys, core.registry, worker=worker, models=KnownModels(settings))
        self._left = LeftJobs(server, keys, self._providers)
        self._turns = turns = AttemptRunner(
            server,
            keys,
            self._queue,
            self._writer,
            self._providers,
            media=TurnMedia(self._blobs, Uploads(UploadedFiles(server, keys), uploads)),
            admission=self.admission,
            scopes=Scopes(limits, keys),
            images=ImageStore(self._blobs, largest_bytes=settings.blobs.max_bytes),
            answer_bytes=limits.answer_bytes,
            stop=self._stop,
            left=self._left,
            keep=media.keep,
            retry=settings.retry,
            silent=self._silent,
            tracer=core.tracer,
        )
        self._attempts = InFlight(
            self._queue,
            most=round(limits.runs_per_fetcher * (1 + 2 * RESERVE)) + limits.waiting_per_fetcher,
            work=turns.work,
            abandon=turns.abandon,
            poisoned=self._poisoned,
            again=turns.close,
            still_s=lambda item: STILL_S,
            liveness=liveness,
        )
        self._control = ControlListener(server, keys, self._on_control, liveness=liveness)
        self._turned_away = LoggedTasks("requeue", most=lambda: keys.partitions)
        core.deployment.fence()
        core.deployment.on_grown(self._serve_more)

    @property
    def ready(self) -> bool:
        parts = (self._requests, self._queue, self._writer, self.admission)
        return all(part.healthy for part in parts)

    def use_chain(self, chain: Chain) -> None:
        """Write through the stages of this process if they can take it; before `open`."""
        self._writer.chain = chain

    async def open(self) -> None:
        await self._core.open()
        await self._silent.open(self.liveness)
        await self._writer.open()
        await self._limiter.open()
        await self.admission.open()
        await self._control.open()
        await self._requests.open()
        await self._queue.open()

    async def drain(self) -> None:
        """Take nothing new, and let calls finish for `stages.drain_s`; once."""
        if self._queue.closing:
            return
        await asyncio.gather(self._requests.stop_reading(), self._queue.stop_reading())
        await self._cancels.close()
        await self._intake.close()
        await self._turned_away.close()
        await self.admission.close()
        await self._attempts.drain(self._settings.stages.drain_s)

    async def close(self) -> None:
        """Hand over what has not finished."""
        await self.drain()
        failed = self.liveness.failed
        await self._attempts.stop()
        self._turns.steered.close()
        await self._left.close()
        await self._limiter.close()
        # Handlers that still accept a request may finish it; but if this worker has failed, it is unknown whether they
        # do.
        await self._requests.close(used=lambda item: not failed)
        await self._queue.close()
        await self._control.close()
        await self._silent.close()
        await self._writer.close()
        await self._providers.close()
        await self._blobs.aclose()
        await self._core.close()

    async def _serve_more(self, keys: Keys) -> None:
        await self._control.add(keys)
        await self._queue.add(_turns(keys))

    async def read_requests(self) -> list[QueueItem]:
        return await self._requests.read_ready()

    async def accept_requests(self, items: list[QueueItem]) -> None:
        """Create runs from the requests."""
        try:
            await self._intake.accept(items)
        except BaseException:
            self._requests.release(items)  # if kept alive here, no worker would handle them
            raise

    async def read_turns(self) -> list[QueueItem]:
        """Read the next attempts once there is room for one."""
        await self._attempts.room()
        return await self._queue.read_ready()

    async def start_turns(self, items: list[QueueItem]) -> None:
        """Start the attempts; those of a tenant that has used up its waiting places are requeued."""
        away: list[QueueItem] = []
        for item in items:
            # An attempt that is lost already is only closed here, and needs no place.
            if is_lost(item) or self.admission.has_place(_tenant(item)):
                await self._attempts.start(item)
                # Start one per pass of the event loop: the busier the loop, the fewer runs start. Started all at once,
                # each would wait for the steps of all others, and so would cancels and intake.
                await asyncio.sleep(0)
            else:
                away.append(item)
        if away:
            by_stream: dict[str, list[QueueItem]] = {}
            for item in away:
                by_stream.setdefault(item.stream, []).append(item)
            await self._turned_away.run(partial(self._queue.requeue, each) for each in by_stream.values())
            await rest(len(away) * TURNED_AWAY_S)

    async def _unreadable_request(self, item: QueueItem, error: Exception) -> None:
        await self._intake.unreadable(item, error)

    async def _poisoned(self, item: QueueItem, error: Exception) -> None:
        await dead_letter_run(self._server, self._settings, self.name, item, error)

    def _cancel(self, item: QueueItem) -> bool:
        return self._cancels.take(item)

    def _stop(self, item: QueueItem) -> None:
        self._attempts.stop_item(item)

    def _on_claimed_away(self, item: QueueItem) -> None:
        self._attempts.on_claimed_away(item)

    def _on_control(self, message: Control) -> None:
        if message.what == "steer":
            self._turns.steered.steer(message.run, message.attempt)
        elif message.what == "cancel":
            self._turns.steered.drop(message.run)
        stop_calls(self._attempts, message)


def _tenant(item: QueueItem) -> str:
    try:
        return next(waits_as(turn_decoder.decode(data)) for data in item.fields.values())
    except msgspec.MsgspecError:
        return ""  # its work will report what is wrong with it


def _turns(keys: Keys) -> list[str]:
    return [keys.topic(p, "turns") for p in range(keys.partitions)]


# A cancel becomes a closed socket: the calls of attempts that are over are stopped.
#
# `control` names a run that was cancelled, or an attempt that the parser closed, to every worker. The one that makes
# its call cancels the call's task (`InFlight`). The connection closes on the way out of `provider_call.fetch`, so the
# provider stops generating.


def stop_calls(attempts: InFlight, message: Control) -> None:
    """Stop the calls of this worker that the message ends."""
    if message.what == "cancel":
        attempts.cancel(message.run)
    elif message.what == "closed":
        attempts.cancel(message.run, which=lambda item: _attempt_of(item, message.run) <= message.attempt)


def _attempt_of(item: QueueItem, run: str) -> float:
    try:
        return turn_decoder.decode(item.fields[run.encode()]).attempt
    except msgspec.MsgspecError:
        return inf  # its work will report what is wrong with it

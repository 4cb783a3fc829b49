"""The parser's application."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus.bus.keys import PUBLIC_TOPICS
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage
from tokenbus_services.parser.activity import ActivityCounter
from tokenbus_services.parser.durable_ends import DurableEnds
from tokenbus_services.parser.logic import ParserLogic, RunObserver
from tokenbus_services.parser.metrics import AttemptMetrics, RunLog, RunMetrics
from tokenbus_services.parser.room import RoomKeeper
from tokenbus_services.parser.run_spans import RunSpans
from tokenbus_services.parser.timeouts import TimeoutClock
from tokenbus_services.runtime.worker_core import StageService, WorkerCore, stage_app
from tokenbus_services.settings import Settings


def parser(core: WorkerCore) -> StageService:
    """Add a parser to this process."""
    settings, keys = core.settings, core.settings.keys
    metrics = RunMetrics(core.registry)
    activity = ActivityCounter(
        core.server, keys, settings, characters=lambda: metrics.characters, owned=lambda: service.owned
    )
    spans = RunSpans(core.tracer, settings)
    room = RoomKeeper(core.server, settings, core.registry, owned=lambda: service.owned)
    observers: list[RunObserver] = [AttemptMetrics(core.registry, settings), RunLog(), activity, spans]
    on_block = spans.block_complete if core.tracer.content else None
    logics: dict[int, ParserLogic] = {}
    kept = settings.retention
    lifetimes = RunLifetimes(
        round(kept.open_run_s * 1000), round(kept.finished_run_s * 1000), round(kept.session_s * 1000)
    )

    ends = DurableEnds(core.server, keys, logics, owned=lambda: service.owned)

    def logic(partition: int) -> ParserLogic:
        logics[partition] = ParserLogic(
            partition,
            keys.within(partition),
            topics=settings.topics,
            lifetimes=lifetimes,
            on_published=metrics.count,
            observers=observers,
            on_block=on_block,
            on_sealed=ends.look,
        )
        return logics[partition]

    async def opening(liveness: Liveness) -> None:
        await activity.open(liveness)
        await room.open(liveness)
        await ends.open(liveness)

    async def closing() -> None:
        await ends.close()
        await room.close()
        await activity.close()

    def clock(server: Server, stage: Stage, liveness: Liveness) -> TimeoutClock:
        return TimeoutClock(server, stage, settings, logics, liveness)

    service = StageService(
        core,
        name="parser",
        topic="events",
        logic=logic,
        companion=clock,
        description="Everything that can change a run's output, in one total order a partition.",
        publishes=[t for t in PUBLIC_TOPICS if t == "runs" or t in settings.topics],
        opening=opening,
        closing=closing,
    )
    return service


def create(settings: Settings) -> AsgiFastStream:
    """Create one parser worker."""
    core = WorkerCore(settings, "parser")
    return stage_app(parser(core), core)

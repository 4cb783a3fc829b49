"""The pipeline worker's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus.bus.stage.chain import Chain
from tokenbus.bus.stage.stage import Stage
from tokenbus_services.fetcher.app import fetcher
from tokenbus_services.fetcher.service import FetcherService
from tokenbus_services.normalizer.app import normalizer
from tokenbus_services.parser.app import parser
from tokenbus_services.runtime.app.service_app import make_app
from tokenbus_services.runtime.worker_core import StageService, WorkerCore
from tokenbus_services.settings import Settings


def create(settings: Settings) -> AsgiFastStream:
    """Create one pipeline worker. Raises SettingsError if the blob store is not usable."""
    core = WorkerCore(settings, "pipeline")
    first, second = normalizer(core), parser(core)
    intake = fetcher(core, prefers=lambda partition: partition in first.owned and partition in second.owned)
    service = PipelineService(core, intake, first, second)
    return make_app(service, core.broker, core.registry, stuck_s=core.stuck_s, measure=core.measure, drain=intake.drain)


class PipelineService:
    """One process with a fetcher and both stages. The stages are ready before the first attempt, and end after it."""

    name = "pipeline"

    def __init__(
        self, core: WorkerCore, fetcher: FetcherService, normalizer: StageService, parser: StageService
    ) -> None:
        self.liveness = core.liveness
        self._core = core
        self._fetcher = fetcher
        self._normalizer = normalizer
        self._parser = parser
        self._chain: Chain | None = None

    @property
    def ready(self) -> bool:
        return self._fetcher.ready and self._normalizer.ready and self._parser.ready

    async def open(self) -> None:
        await self._parser.open()
        await self._normalizer.open()
        await self._core.open()
        services = (self._normalizer, self._parser)
        metrics = {service.stage: self._core.stage_metrics.of(service.name) for service in services}

        def count(stage: Stage, entries: int, seconds: float) -> None:
            metrics[stage].entries.inc(entries)
            metrics[stage].batch_s.observe(seconds)

        self._chain = Chain(
            self._core.server,
            self._core.settings.keys,
            self._normalizer.stage,
            self._parser.stage,
            on_commit=count,
        )
        self._fetcher.use_chain(self._chain)
        await self._fetcher.open()

    async def close(self) -> None:
        await self._fetcher.close()
        if self._chain:
            self._chain.close()
        await self._normalizer.close()
        await self._parser.close()
        await self._core.close()

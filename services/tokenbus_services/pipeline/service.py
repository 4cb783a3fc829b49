"""The services of a pipeline worker, opened and closed in the order of the data's way."""

from __future__ import annotations

from tokenbus_services.fetcher.service import FetcherService
from tokenbus_services.runtime.stage_service import StageService
from tokenbus_services.runtime.worker_core import WorkerCore


class PipelineService:
    """One process with a fetcher and both stages. The stages are ready before the first attempt, and end after it."""

    name = "pipeline"

    def __init__(
        self, core: WorkerCore, fetcher: FetcherService, normalizer: StageService, parser: StageService
    ) -> None:
        self.liveness = core.liveness
        self._fetcher = fetcher
        self._stages = (parser, normalizer)

    @property
    def ready(self) -> bool:
        return self._fetcher.ready and all(stage.ready for stage in self._stages)

    async def open(self) -> None:
        for stage in self._stages:
            await stage.open()
        await self._fetcher.open()

    async def close(self) -> None:
        await self._fetcher.close()
        for stage in reversed(self._stages):
            await stage.close()

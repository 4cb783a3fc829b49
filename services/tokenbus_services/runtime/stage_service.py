"""An ordered stage as a service: the runtime of `tokenbus.bus.stage.stage` under a FastStream app."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from faststream.asgi import AsgiFastStream

from tokenbus.bus.keys import InternalTopic, PublicTopic
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.stage import Batch, Stage, StageOptions
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import declare_topics, make_app
from tokenbus_services.runtime.worker_core import WorkerCore

STRETCH_S = 1.0
"""Longest time that consecutive batches are one message to FastStream."""


class Companion(Protocol):
    """Runs alongside the stage in its worker: opened after it, closed before it."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


MakeCompanion = Callable[[Server, Stage, Liveness], Companion]
Open = Callable[[Liveness], Awaitable[None]]
Close = Callable[[], Awaitable[None]]
Room = Callable[[], Awaitable[None]]
"""Waits until there is room for more."""


class StageService:
    """One worker of an ordered stage."""

    def __init__(
        self,
        core: WorkerCore,
        *,
        name: str,
        topic: InternalTopic,
        logic: Callable[[int], StageLogic],
        description: str,
        downstream: str | None = None,
        publishes: Sequence[PublicTopic] = (),
        companion: MakeCompanion | None = None,
        opening: Open | None = None,
        closing: Close | None = None,
        room: Room | None = None,
    ) -> None:
        """Adds the stage to the broker and the metrics of its process.

        - ``companion``: creates the services that run alongside the stage.
        - ``opening``: starts what the logic needs, before the worker acquires a partition.
        - ``closing``: releases what the logic needs, after all work has ended.
        - ``room``: awaited before each read.
        """
        self.name = name
        self.liveness = core.liveness
        self._core = core
        self._settings = settings = core.settings
        self._topic: InternalTopic = topic
        self._logic = logic
        self._downstream = downstream
        self._metrics = core.stage_metrics.of(name)
        self._stage: Stage | None = None
        self._make_companion = companion
        self._companion: Companion | None = None
        self._opening = opening
        self._closing = closing
        self._room = room
        core.gauges.add(name, lambda: self._stage.owned if self._stage else ())
        attach(
            core.broker,
            stream=f"{settings.prefix}:{{n}}:{topic}",
            title=name,
            description=description,
            read=self.read,
            handle=self.handle,
            liveness=core.liveness,
            stretch_s=STRETCH_S,
        )
        declare_topics(core.broker, settings, publishes)

    @property
    def stage(self) -> Stage:
        """The stage, once it is open."""
        assert self._stage
        return self._stage

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker is processing."""
        return self._stage.owned if self._stage else []

    @property
    def ready(self) -> bool:
        return self._stage is not None and self._stage.healthy

    async def open(self) -> None:
        info = await self._core.open()
        s = self._settings
        if self._opening:
            await self._opening(self.liveness)
        self._stage = Stage(
            self._core.server,
            s.keys,
            StageOptions(
                group=self.name,
                topic=self._topic,
                worker=self._core.worker,
                downstream=self._downstream,
                lag_bytes=s.limits.lag_bytes,
                lease_s=s.stages.lease_s,
                tick_s=s.stages.tick_s,
                max_records=s.stages.max_records,
                topic_entries=s.retention.topic_entries,
                dead_entries=s.retention.dead_entries,
                entries_read=info.entries_read,
            ),
            self._logic,
            liveness=self.liveness,
        )
        self._metrics.partitions.set_function(lambda stage=self._stage: len(stage.owned))
        self._metrics.blocked.set_function(lambda stage=self._stage: len(stage.blocked))
        await self._stage.open()
        if self._make_companion:
            self._companion = self._make_companion(self._core.server, self._stage, self.liveness)
            await self._companion.open()

    async def close(self) -> None:
        if self._companion:
            await self._companion.close()
        if self._stage:
            await self._stage.close()
        if self._closing:
            await self._closing()
        await self._core.close()

    async def read(self) -> list[Batch] | None:
        """Read the new entries of the owned partitions."""
        assert self._stage
        if self._room:
            await self._room()
        return await self._stage.read() or None

    async def handle(self, batches: list[Batch]) -> None:
        """Process the batches and commit."""
        assert self._stage
        begin = time.perf_counter()
        await self._stage.process(batches)
        self._metrics.batch_s.observe(time.perf_counter() - begin)
        self._metrics.entries.inc(sum(len(b.entries) for b in batches))


def stage_app(service: StageService, core: WorkerCore) -> AsgiFastStream:
    """Create the FastStream app of a worker that runs one ordered stage."""
    return make_app(service, core.broker, core.registry, stuck_s=core.stuck_s, measure=core.measure)

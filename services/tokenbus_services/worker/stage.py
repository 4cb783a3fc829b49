"""An ordered stage as a service: the runtime of `tokenbus.bus.stage` under a FastStream app."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from faststream.asgi import AsgiFastStream
from prometheus_client import CollectorRegistry

from tokenbus.bus.keys import InternalTopic, PublicTopic
from tokenbus.bus.server import Server, join_deployment
from tokenbus.bus.stage import Batch, Logic, Stage
from tokenbus_services.settings import Settings
from tokenbus_services.worker.app import declare_topics, make_app, make_broker, worker_name
from tokenbus_services.worker.metrics import StageMetrics
from tokenbus_services.worker.source import attach

STRETCH_S = 1.0
"""Batches that follow one on another are one message to FastStream, for so long at the most."""


class StageService:
    """One worker of an ordered stage."""

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        topic: InternalTopic,
        logic: Callable[[int], Logic],
        downstream: str | None,
        metrics: StageMetrics,
    ) -> None:
        assert settings.redis_url
        self.name = name
        self._settings = settings
        self._topic: InternalTopic = topic
        self._logic = logic
        self._downstream = downstream
        self._metrics = metrics
        self._server = Server(settings.redis_url)
        self._stage: Stage | None = None

    @property
    def ready(self) -> bool:
        return self._stage is not None and self._stage.healthy

    async def open(self) -> None:
        info = await self._server.check()
        s = self._settings
        await join_deployment(self._server, s.keys)
        self._stage = Stage(
            self._server,
            s.keys,
            group=self.name,
            topic=self._topic,
            worker=worker_name(),
            logic=self._logic,
            downstream=self._downstream,
            lag_bytes=s.limits.lag_bytes,
            lease_s=s.stages.lease_s,
            tick_s=s.stages.tick_s,
            max_records=s.stages.max_records,
            topic_entries=s.retention.topic_entries,
            dead_entries=s.retention.dead_entries,
            entries_read=info.entries_read,
        )
        self._metrics.partitions.set_function(lambda stage=self._stage: len(stage.owned))
        await self._stage.open()

    async def close(self) -> None:
        if self._stage:
            await self._stage.close()
        await self._server.aclose()

    async def read(self) -> list[Batch] | None:
        """What the owned partitions hold that is new."""
        assert self._stage
        return await self._stage.read() or None

    async def handle(self, batches: list[Batch]) -> None:
        """Work it in and commit."""
        assert self._stage
        begin = time.perf_counter()
        await self._stage.process(batches)
        self._metrics.batch_s.observe(time.perf_counter() - begin)
        self._metrics.entries.inc(sum(len(b.entries) for b in batches))


def stage_app(
    settings: Settings,
    *,
    name: str,
    topic: InternalTopic,
    logic: Callable[[int], Logic],
    description: str,
    downstream: str | None = None,
    publishes: Sequence[PublicTopic] = (),
) -> AsgiFastStream:
    """The FastStream app of an ordered stage's worker."""
    registry = CollectorRegistry()
    broker = make_broker(settings, registry)
    service = StageService(
        settings, name=name, topic=topic, logic=logic, downstream=downstream, metrics=StageMetrics(registry, name)
    )
    attach(
        broker,
        stream=f"{settings.prefix}:{{n}}:{topic}",
        title=name,
        description=description,
        read=service.read,
        handle=service.handle,
        stretch_s=STRETCH_S,
    )
    declare_topics(broker, settings, publishes)
    return make_app(service, broker, registry)

"""What all services of one process share: the connections to the server, the tasks it lives by, and its name.

Also the agreement with the deployment, and an ordered stage as a service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Protocol

import structlog
from faststream.asgi import AsgiFastStream
from faststream.redis import RedisBroker
from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import RedisError

from tokenbus.bus.keys import InternalTopic, Keys, PublicTopic
from tokenbus.bus.layout import Layout, fence, join_deployment
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.server.durability import DISK_SINCE, NO_DURABILITY, Durability
from tokenbus.bus.server.server import Server, ServerInfo
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.stage import Batch, Stage, StageOptions
from tokenbus.errors import ServerFull, ServerUnavailable, SettingsError
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import declare_topics, make_app, make_broker, worker_name
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader
from tokenbus_services.runtime.metrics import DeadLetterMetrics, DeploymentGauges, PartitionGauges, StageMetrics
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import DurabilitySettings, Settings
from tokenbus_services.telemetry import RunTracer, open_tracer


class WorkerCore:
    """One per process. Each service calls `open`, then `close`: the first opens, the last closes."""

    def __init__(self, settings: Settings, service: str) -> None:
        assert settings.redis_url
        self.settings = settings
        self.registry = CollectorRegistry()
        self.broker: RedisBroker = make_broker(settings, self.registry)
        self.server = Server(settings.redis_url)
        self.server.on_dead_letter = DeadLetterMetrics(self.registry).count
        ahead = Gauge(
            "tokenbus_clock_ahead_seconds",
            "How far the clock of this machine is ahead of the server's.",
            registry=self.registry,
        )
        ahead.set_function(lambda: time.time() - self.server.clock.now_ms() / 1000)
        self.liveness = Liveness()
        self.worker = worker_name()
        self.stuck_s = stuck_after_s(settings.redis_url)
        self.deployment = DeploymentAgreement(
            self.server, settings.keys, self.liveness, settings.durability, worker=self.worker
        )
        self._info: ServerInfo | None = None
        self._users = 0
        self._service = service
        self._deployment_gauges: DeploymentGauges | None = None

    @cached_property
    def tracer(self) -> RunTracer:
        """Records spans of runs. Raises SettingsError if its packages are missing."""
        return open_tracer(self.settings, self._service, self.registry)

    @cached_property
    def stage_metrics(self) -> StageMetrics:
        """Metrics of the ordered stages in this process."""
        return StageMetrics(self.registry)

    @cached_property
    def gauges(self) -> PartitionGauges:
        return PartitionGauges(self.registry, self.settings.keys)

    def watch_deployment(self) -> None:
        """Show on `/metrics` what exists once in the deployment too."""
        settings = self.settings
        further, judged = settings.further_queues, bool(settings.policies)
        reader = DeploymentReader(self.server, settings.keys, further=further, judged=judged, workers=False)
        self._deployment_gauges = DeploymentGauges(self.registry, self.server, reader)

    async def open(self) -> ServerInfo:
        """Check the server and join the deployment. Raises TokenbusError if the settings and the server disagree."""
        if self._info is None:
            self._info = await self.server.check()
            if self.server.durability.disk and self._info.version < DISK_SINCE:
                problem = f"{self._info.name} has no WAITAOF before {'.'.join(map(str, DISK_SINCE))}"
                raise SettingsError("durability", "disk", problem)
            await self.deployment.open()
        self._users += 1
        return self._info

    async def close(self) -> None:
        """Close the connections if no other service of the process uses them."""
        self._users -= 1
        if self._users <= 0:
            await self.deployment.close()
            await self.server.aclose()
            await self.tracer.close()

    async def measure(self) -> None:
        """Measure the server's data, for `/metrics`."""
        await self.gauges.measure(self.server)
        if self._deployment_gauges:
            await self._deployment_gauges.measure()


# A server that was flushed, or came back empty, has lost the agreement. Then a new process could set up another
# deployment over the running one. So each worker repeats it. In this way it also detects a change of the number of
# partitions (tokenbus/bus/layout.py).


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AGREE_S = 1.0
"""How often the agreement is repeated."""

OnGrown = Callable[[Keys], Awaitable[None]]
"""Serves the partitions that were added too."""


class DeploymentAgreement:
    """Call `open`, then `close`."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        liveness: Liveness,
        durability: DurabilitySettings | None,
        *,
        worker: str = "",
    ) -> None:
        """``worker``: name of this worker in the members of its groups; empty if it is in none."""
        server.durability = durability.meant if durability else Durability()
        self._durability = server.durability.encoded if durability else NO_DURABILITY
        self._server = server
        self._keys = keys
        self._liveness = liveness
        self._worker = worker
        self._on_grown: list[OnGrown] = []
        self._fences = False
        self._task: asyncio.Task[None] | None = None

    def on_grown(self, serve: OnGrown) -> None:
        """Call this when partitions are added, also when the worker starts with fewer in its settings. May be awaited
        again with the same.
        """
        self._on_grown.append(serve)

    def fence(self) -> None:
        """Let no worker create runs by an earlier number, before this one creates some by a new one."""
        self._fences = True

    async def open(self) -> None:
        """Join the deployment and start repeating it. Raises DeploymentMismatch, ServerUnavailable, ServerFull."""
        configured = self._keys.numbers[0]
        layout = await self._join()
        await self._follow(layout)
        if layout.placing != configured:
            log.warning("partitions_setting_outdated", settings=configured, deployment=layout.placing)
        self._task = self._liveness.start(self._agree(), name="deployment")

    async def close(self) -> None:
        """Stop repeating it."""
        await stop_task(self._task)

    async def _agree(self) -> None:
        """Ends with DeploymentMismatch, and the worker with it, if another deployment was set up meanwhile."""
        while True:
            await rest(AGREE_S)
            try:
                await self._follow(await self._join(worker=self._worker))
            except (ServerUnavailable, ServerFull, RedisError, OSError) as e:  # the tasks that use the server handle it
                log.debug("deployment_not_confirmed", problem=str(e))

    async def _join(self, *, worker: str = "") -> Layout:
        return await join_deployment(self._server, self._keys, worker=worker, durability=self._durability)

    async def _follow(self, layout: Layout) -> None:
        keys = self._keys
        if layout.epoch > keys.epoch:
            # The partitions first: from here on runs may be in them. Then what they are served by.
            keys.widen(layout.numbers, layout.spread)
            for serve in self._on_grown:
                await serve(keys)
            if self._fences:
                await fence(self._server, keys, layout)
            keys.apply(layout.numbers, layout.spread, layout.epoch, layout.ever)
            log.info("partitions_changed", new_runs=layout.placing, served=layout.spread, epoch=layout.epoch)
        keys.numbers_read_at = time.monotonic()


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

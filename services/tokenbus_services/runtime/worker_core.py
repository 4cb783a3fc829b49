"""What all services of one process share: the connections to the server, the tasks it lives by, and its name."""

from __future__ import annotations

from functools import cached_property

from faststream.redis import RedisBroker
from prometheus_client import CollectorRegistry

from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server, ServerInfo
from tokenbus_services.runtime.app.service_app import make_broker, worker_name
from tokenbus_services.runtime.deployment_agreement import DeploymentAgreement
from tokenbus_services.runtime.metrics import (
    DeadLetterMetrics,
    DeploymentGauges,
    PartitionGauges,
    StageMetrics,
)
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import Settings
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
        self.liveness = Liveness()
        self.worker = worker_name()
        self.stuck_s = stuck_after_s(settings.redis_url)
        self.deployment = DeploymentAgreement(self.server, settings.keys, self.liveness, worker=self.worker)
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
        """Gauges of the partitions of those stages."""
        return PartitionGauges(self.registry, self.settings.keys)

    def watch_deployment(self) -> None:
        """Show on `/metrics` what exists once in the deployment too."""
        settings = self.settings
        self._deployment_gauges = DeploymentGauges(
            self.registry,
            self.server,
            settings.keys,
            judged=bool(settings.policies),
            recorded=settings.records is not None,
        )

    async def open(self) -> ServerInfo:
        """Check the server and join the deployment. Raises TokenbusError if the settings and the server disagree."""
        if self._info is None:
            self._info = await self.server.check()
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

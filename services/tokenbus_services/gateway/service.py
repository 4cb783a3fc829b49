"""The gateway as a service: its connection to the bus, opened before the first request and closed after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from redis.exceptions import RedisError

from tokenbus import Client
from tokenbus.bus import scripts
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.client.client import watch_readers
from tokenbus.errors import ServerFull, ServerUnavailable
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.runtime.worker_core import DeploymentAgreement
from tokenbus_services.settings import Settings
from tokenbus_services.telemetry import RunTracer

HEARTBEAT_S = 1.0
TTL_MS = 5_000


class GatewayPart(Protocol):
    """A part of the gateway with a lifetime of its own."""

    async def open(self, liveness: Liveness) -> None:
        """Start. Start tasks that run as long as the gateway through ``liveness``."""
        ...

    async def close(self) -> None: ...


class GatewayService:
    """Stateless: any number of gateways can serve the same runs."""

    name = "gateway"

    def __init__(
        self,
        settings: Settings,
        *,
        worker: str,
        server: Server,
        bus: Client,
        gateway: Gateway,
        parts: Sequence[GatewayPart] = (),
        tracer: RunTracer | None = None,
    ) -> None:
        """``parts``: opened after access control, and closed before it."""
        self.liveness = Liveness()
        self._server = server
        self._bus = bus
        self._gateway = gateway
        self._worker = worker
        self._deployment = DeploymentAgreement(
            server, settings.keys, self.liveness, settings.durability, worker=self._worker
        )
        self._parts = parts
        self._tracer = tracer
        self._members = settings.keys.gateway_members
        self._heartbeat: asyncio.Task[None] | None = None
        self._open = False

    @property
    def ready(self) -> bool:
        return self._open

    async def open(self) -> None:
        await self._server.check()
        await self._deployment.open()
        watch_readers(self._bus, self.liveness)
        await self._bus.__aenter__()
        await self._gateway.access.open(self.liveness)
        await self._gateway.forwarder.open(self.liveness, worker=self._worker)
        await self._gateway.conversations.open(self.liveness)
        for part in self._parts:
            await part.open(self.liveness)
        self._heartbeat = self.liveness.start(self._beat(), name="heartbeat")
        self._open = True

    async def close(self) -> None:
        self._open = False
        await stop_task(self._heartbeat)
        for part in reversed(self._parts):
            await part.close()
        await self._gateway.runs.close()
        await self._gateway.conversations.close()
        await self._gateway.forwarder.close()
        await self._gateway.access.close()
        await self._bus.aclose()
        await self._gateway.aclose()
        await self._deployment.close()
        await self._server.aclose()
        if self._tracer:
            await self._tracer.close()

    async def _beat(self) -> None:
        """Publish a heartbeat for `top` and `doctor`, because a gateway has no lease or queue that shows it is
        alive."""
        call = scripts.present(self._members, member=self._worker, ttl_ms=TTL_MS)
        while True:
            with suppress(ServerUnavailable, ServerFull, RedisError, OSError):  # requests report an outage
                await run_script(self._server, call)
            await rest(HEARTBEAT_S)

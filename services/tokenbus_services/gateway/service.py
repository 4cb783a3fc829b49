"""The gateway as a service: its connection to the bus, opened before the first request and closed after the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenbus import Client
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.runtime.deployment import Deployment
from tokenbus_services.settings import Settings


class Part(Protocol):
    """Something that works beside the requests."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...


class GatewayService:
    """Holds no state of its own: any number of gateways serve the same runs."""

    name = "gateway"

    def __init__(
        self, settings: Settings, *, server: Server, bus: Client, gateway: Gateway, beside: Sequence[Part] = ()
    ) -> None:
        """``beside``: opened after the door, and closed before it."""
        self.liveness = Liveness()
        self._server = server
        self._bus = bus
        self._gateway = gateway
        self._deployment = Deployment(server, settings.keys, self.liveness)
        self._beside = beside
        self._open = False

    @property
    def ready(self) -> bool:
        return self._open

    async def open(self) -> None:
        await self._server.check()
        await self._deployment.open()
        await self._bus.__aenter__()
        await self._gateway.door.open()
        for part in self._beside:
            await part.open()
        self._open = True

    async def close(self) -> None:
        self._open = False
        for part in reversed(self._beside):
            await part.close()
        await self._gateway.runs.close()
        await self._gateway.door.close()
        await self._bus.aclose()
        await self._gateway.aclose()
        await self._deployment.close()
        await self._server.aclose()

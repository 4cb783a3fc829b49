"""One fetcher: its queues, its writer and its turns, opened and closed in the order that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.control import ControlListener
from tokenbus.bus.queue import Item, Queue
from tokenbus.bus.server import Server, join_deployment
from tokenbus.events.frames import Control
from tokenbus.events.requests import Tool
from tokenbus_services.fetcher.intake import Intake
from tokenbus_services.fetcher.providers import Providers
from tokenbus_services.fetcher.turns import Turns
from tokenbus_services.fetcher.writer import RawWriter
from tokenbus_services.settings import Settings
from tokenbus_services.worker.app import worker_name
from tokenbus_services.worker.inflight import InFlight, bury_item

INTAKE_GROUP = "intake"
TURNS_GROUP = "fetcher"
INTAKE_COUNT = 64


class FetcherService:
    """Intake and provider calls in one process."""

    name = "fetcher"

    def __init__(self, settings: Settings, tools: Sequence[Tool]) -> None:
        assert settings.redis_url
        self._settings = settings
        keys = settings.keys
        self._server = server = Server(settings.redis_url)
        worker = worker_name()
        self._providers = Providers(settings)
        self._writer = RawWriter(
            server, keys, linger_s=settings.stages.linger_ms / 1000, lag_bytes=settings.limits.lag_bytes
        )
        self._requests = Queue(
            server,
            group=INTAKE_GROUP,
            streams=[keys.requests],
            worker=worker,
            lost=lambda item: None,  # its script decided already who took it in
            count=INTAKE_COUNT,
        )
        self._queue = Queue(
            server,
            group=TURNS_GROUP,
            streams=[keys.topic(p, "turns") for p in range(keys.partitions)],
            worker=worker,
            lost=self._lost,
        )
        self._intake = Intake(server, settings, self._requests, providers=self._providers.get, tools=tools)
        turns = Turns(server, keys, self._queue, self._writer, self._providers)
        self.attempts = InFlight(
            self._queue,
            most=settings.limits.runs_per_fetcher,
            work=turns.work,
            abandon=turns.abandon,
            poisoned=self._poisoned,
        )
        self._control = ControlListener(server, keys, self._told)

    @property
    def ready(self) -> bool:
        return self._requests.healthy and self._queue.healthy

    async def open(self) -> None:
        await self._server.check()
        await join_deployment(self._server, self._settings.keys)
        await self._writer.open()
        await self._control.open()
        await self._requests.open()
        await self._queue.open()

    async def close(self) -> None:
        """Take nothing new, let runs finish for a while, hand the rest over."""
        await self._requests.stop_reading()
        await self._queue.stop_reading()
        await self.attempts.drain(self._settings.stages.drain_s)
        await self.attempts.stop()
        await self._requests.close()
        await self._queue.close()
        await self._control.close()
        await self._writer.close()
        await self._providers.close()
        await self._server.aclose()

    async def read_requests(self) -> list[Item]:
        """The next requests."""
        return await self._requests.read_ready()

    async def take_in(self, items: list[Item]) -> None:
        """Make runs of them."""
        await self._intake.take(items)

    async def read_turn(self) -> Item:
        """The next attempt to make, once there is room for it."""
        await self.attempts.room()
        return await self._queue.read()

    async def start_turn(self, item: Item) -> None:
        """Make it."""
        await self.attempts.start(item)

    async def _poisoned(self, item: Item, error: Exception) -> None:
        await bury_item(self._server, self._settings, self.name, item, error)

    def _lost(self, item: Item) -> None:
        self.attempts.lost(item)

    def _told(self, message: Control) -> None:
        if message.what == "cancel":
            self.attempts.cancel(message.run)

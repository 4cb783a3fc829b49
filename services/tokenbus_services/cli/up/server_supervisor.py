"""The embedded server of `tokenbus up`: restarted on the same port if it dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenbus.errors import ServerUnavailable
from tokenbus_services.cli.up.restart_backoff import RestartBackoff
from tokenbus_services.cli.up.supervisor import Watcher
from tokenbus_services.process.embedded_server import EmbeddedServer

NAME = "server"
_LOOK_S = 0.25


class UpServer:
    """``async with UpServer(directory, watcher) as server: … server.url``. Its data survive a restart."""

    def __init__(self, directory: Path, watcher: Watcher) -> None:
        """Raises ServerUnavailable if there is no server binary."""
        self._embedded = EmbeddedServer(directory, appendonly=True)
        self._watcher = watcher
        self._stop = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self._embedded.url

    async def __aenter__(self) -> Self:
        """Start the server. Raises ServerUnavailable."""
        await asyncio.to_thread(self._embedded.start)
        self._keeping = asyncio.create_task(self._keep(), name="own server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeping
        self._stop.set()
        await self._keeping  # not cancelled: a start running in its thread would overlap with the stop
        await asyncio.to_thread(self._embedded.stop)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        restarts = RestartBackoff()
        started = loop.time()
        while not await self._stopped_within(_LOOK_S):
            if self._embedded.running:
                continue
            pause_s = restarts.pause_s(ready_for_s=loop.time() - started)
            self._watcher.died(NAME, "ended", pause_s)
            if await self._stopped_within(pause_s):
                return
            try:
                await asyncio.to_thread(self._embedded.start)
                started = loop.time()
                self._watcher.ready(NAME, self.url)
            except ServerUnavailable as e:
                self._watcher.on_line(NAME, str(e))

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stop.wait()
        except TimeoutError:
            return False

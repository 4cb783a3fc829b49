"""Forks executors one at a time, to the end even if the caller is cancelled, and replaces a fork server that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokenbus_services.policy_stage.executor.client import ExecutorProcess, Serves
from tokenbus_services.policy_stage.executor.fork_server import ForkServer
from tokenbus_services.policy_stage.executor.host_process import rss_bytes
from tokenbus_services.policy_stage.executor.messages import Setup


class ExecutorForks:
    """The executors' fork server, and the forks in progress. Call `open`, then `close`."""

    def __init__(
        self,
        setup: Setup,
        *,
        make: Callable[[Serves], ExecutorProcess],
        on_forked: Callable[[ExecutorProcess], None],
        on_server_lost: Callable[[], None],
    ) -> None:
        """``make``: creates the executor to fork. ``on_forked``: called for each, before the next fork begins.
        ``on_server_lost``: called before a fork server that failed is closed, and all executors with it.
        """
        self._setup = setup
        self._make = make
        self._on_forked = on_forked
        self._on_server_lost = on_server_lost
        self._server: ForkServer | None = None
        self._forking = asyncio.Lock()
        self._forks: set[asyncio.Task[ExecutorProcess]] = set()
        self._replaces_server = True

    async def open(self) -> None:
        """Start the fork server. Raises SettingsError if it cannot load a policy; OSError."""
        self._server = ForkServer(self._setup)
        await self._server.open()

    def keep_server(self) -> None:
        """From now on, do not replace a fork server that fails: its executors are about to end."""
        self._replaces_server = False

    async def close(self) -> None:
        """Cancel the forks in progress, and stop the fork server and all executors with it."""
        forks = [*self._forks]
        for fork in forks:
            fork.cancel()
        await asyncio.gather(*forks, return_exceptions=True)
        if self._server:
            await self._server.close()

    def kill(self, process: ExecutorProcess) -> None:
        """Kill this executor. Does nothing if it is gone."""
        if self._server:
            self._server.kill(process.pid)

    async def fork(self, serves: Serves) -> ExecutorProcess:
        """Fork one. Raises OSError. If the caller is cancelled, the fork is completed all the same: the fork server
        answers in order, and an unread answer would be taken for that of the next fork.
        """
        forking = asyncio.create_task(self._complete_fork(serves), name="fork of an executor")
        self._forks.add(forking)
        forking.add_done_callback(self._forks.discard)
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_leave_unused)
            raise

    async def _complete_fork(self, serves: Serves) -> ExecutorProcess:
        async with self._forking:
            assert self._server
            process = self._make(serves)
            try:
                await process.start(self._server, rss_bytes)
            except (OSError, TimeoutError):
                if self._replaces_server:
                    self._on_server_lost()
                    await self._server.close()
                    await self.open()
                raise
            self._on_forked(process)
            return process


def _leave_unused(fork: asyncio.Task[ExecutorProcess]) -> None:
    if not fork.cancelled() and not fork.exception():
        fork.result().leave_unused()

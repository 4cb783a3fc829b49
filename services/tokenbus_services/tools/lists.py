"""Tells intake which tools the MCP servers list: at start, after each change, and often enough to be believed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
from redis.exceptions import RedisError

from tokenbus_services.worker.listed_tools import REFRESH_S, ListedTools

if TYPE_CHECKING:
    from tokenbus_services.tools.mcp.servers import McpServers

AGAIN_S = 0.5
"""After the server did not take it."""

_log = structlog.stdlib.get_logger()


class McpLists:
    """Writes all lists from one task."""

    def __init__(self, servers: McpServers, lists: ListedTools) -> None:
        self._servers = servers
        self._lists = lists
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Write what is listed by now, and go on."""
        self._servers.listed.clear()
        await self._write()
        self._task = asyncio.create_task(self._keep(), name="mcp lists")

    async def close(self) -> None:
        """Write no more."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _keep(self) -> None:
        pause = REFRESH_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._servers.listed.wait()
            self._servers.listed.clear()
            pause = REFRESH_S if await self._write() else AGAIN_S

    async def _write(self) -> bool:
        try:
            for name, tools in self._servers.definitions.items():
                await self._lists.write(name, tools)
        except (RedisError, OSError) as e:
            _log.warning("mcp_lists_not_written", problem=str(e))
            return False
        return True

"""Publishes the MCP servers' tool lists for intake: at startup, after each change, and periodically."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tokenbus.bus.liveness import Defects, Liveness, wait_briefly
from tokenbus_services.runtime.mcp_tool_cache import REFRESH_S, McpToolCache

if TYPE_CHECKING:
    from tokenbus_services.tools.mcp.registry import McpServers

AGAIN_S = 0.5
"""First retry delay after a failed write; it doubles up to `REFRESH_S`."""

_log = structlog.stdlib.get_logger()


class McpLists:
    """Writes all lists from one task."""

    def __init__(self, servers: McpServers, lists: McpToolCache, liveness: Liveness | None = None) -> None:
        self._servers = servers
        self._lists = lists
        self._liveness = liveness or Liveness()
        self._task: asyncio.Task[None] | None = None
        self._defects = Defects()

    async def open(self) -> None:
        """Write the current lists and start refreshing them."""
        self._servers.listed.clear()
        await self._write()
        self._task = self._liveness.start(self._keep(), name="mcp lists")

    async def close(self) -> None:
        """Stop writing."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        due, again_s = clock() + REFRESH_S, AGAIN_S
        while True:
            if await wait_briefly(self._servers.listed, timeout_s=due - clock()) or clock() >= due:
                self._servers.listed.clear()
                if await self._write():
                    due, again_s = clock() + REFRESH_S, AGAIN_S
                else:
                    due, again_s = clock() + again_s, min(2 * again_s, REFRESH_S)

    async def _write(self) -> bool:
        """Write each list separately, so that one failure does not block the others. Returns whether all were written.

        Raises the error if none could be written several times in a row while the server answered.
        """
        failures: list[Exception] = []
        definitions = self._servers.definitions
        for name, tools in definitions.items():
            try:
                await self._lists.write(name, tools)
            except Exception as e:  # any exception: requests that name a tool need the lists
                failures.append(e)
                _log.warning("mcp_list_not_written", server=name, problem=str(e) or type(e).__name__)
                self._liveness.failed_work("mcp list")
        if failures and len(failures) == len(definitions):
            self._defects.count(failures[0])
        else:
            self._defects.none()
        return not failures

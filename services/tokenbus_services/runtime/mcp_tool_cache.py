"""The tool lists of MCP servers, stored on the server: written by tool executors, read by intake.

One key per MCP server, so any number of executors may write it and reads need no search. It outlives an executor's
restart. Without an executor, requests are refused because the tool is not listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.requests import Tool

TTL_S = 120
REFRESH_S = 30.0
"""How often an executor writes its list, changed or not."""

_decoder = msgspec.json.Decoder(list[Tool])


class McpToolCache:
    """The tool lists of one deployment."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys
        self._read: dict[str, tuple[bytes, dict[str, Tool]]] = {}
        """By MCP server: the last answer, as bytes and decoded."""

    async def write(self, name: str, tools: Sequence[Tool]) -> None:
        """Store the list of the MCP server ``name``. Raises redis-py's errors."""
        await self._server.client.set(self._keys.mcp(name), msgspec.json.encode(tools), ex=TTL_S)

    async def read(self, name: str) -> dict[str, Tool] | None:
        """Return the MCP server's tools by name; None if there is no recent list. Raises redis-py's errors."""
        found: bytes | None = await self._server.client.get(self._keys.mcp(name))
        if found is None:
            return None
        known = self._read.get(name)
        if known is None or known[0] != found:
            known = self._read[name] = found, {tool.name: tool for tool in _decoder.decode(found)}
        return known[1]

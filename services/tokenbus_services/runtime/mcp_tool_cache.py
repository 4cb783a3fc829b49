"""The tools that MCP servers listed, kept on the server: written by tool executors, read where requests are taken in.

One key an MCP server, so that any number of executors may write it and nobody has to search. It lives a little longer
than an executor's restart takes; without one, requests hear that the tool is not listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.requests import Tool

TTL_S = 120
REFRESH_S = 30.0
"""How often an executor writes what it knows, changed or not."""

_decoder = msgspec.json.Decoder(list[Tool])


class McpToolCache:
    """The lists of one deployment."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys
        self._read: dict[str, tuple[bytes, dict[str, Tool]]] = {}
        """The last answer for each MCP server, as bytes and decoded."""

    async def write(self, name: str, tools: Sequence[Tool]) -> None:
        """Make this the list of the MCP server ``name``. Raises what redis-py raises."""
        await self._server.client.set(self._keys.mcp(name), msgspec.json.encode(tools), ex=TTL_S)

    async def read(self, name: str) -> dict[str, Tool] | None:
        """The tools of the MCP server by name; None where nobody listed them lately. Raises what redis-py raises."""
        found: bytes | None = await self._server.client.get(self._keys.mcp(name))
        if found is None:
            return None
        known = self._read.get(name)
        if known is None or known[0] != found:
            known = self._read[name] = found, {tool.name: tool for tool in _decoder.decode(found)}
        return known[1]

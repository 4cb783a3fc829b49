"""The lists of MCP servers on their way to intake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.requests import Tool
from tokenbus_services.runtime.mcp_tool_cache import McpToolCache
from tokenbus_services.tools.mcp.registry import McpLists, McpServers


async def test_a_list_that_cannot_be_written_keeps_no_other_back(server: Server, keys: Keys) -> None:
    lists = McpToolCache(server, keys)
    definitions = {"broken": [Tool(name="a", description="\ud800")], "well": [Tool(name="b")]}
    servers = SimpleNamespace(listed=asyncio.Event(), definitions=definitions)
    announcing = McpLists(cast("McpServers", servers), lists)
    await announcing.open()
    try:
        assert await lists.read("broken") is None
        assert await lists.read("well") == {"b": Tool(name="b")}
        definitions["broken"] = [Tool(name="a")]  # retried without a notification
        await eventually(lambda: lists.read("broken"))
    finally:
        await announcing.close()

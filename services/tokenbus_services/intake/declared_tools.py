"""Tools that a request only names: completed from what the deployment declares, or its MCP servers list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.core.nearest_name import nearest
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, Tool
from tokenbus_services.runtime.mcp_tool_cache import McpToolCache


class DeclaredTools:
    """The tools that a request may name without repeating their schema."""

    def __init__(
        self, server: Server, tools: Sequence[Tool], *, mcp_prefixes: Mapping[str, str], listed: McpToolCache
    ) -> None:
        """``mcp_prefixes``: of the names of each MCP server's tools, by server."""
        self._server = server
        self._tools = {tool.name: tool for tool in tools}
        self._mcp_prefixes = mcp_prefixes
        self._listed = listed

    async def complete(self, request: Generate) -> Generate:
        """Complete tools that the request only names with the deployment's description and schema."""
        known = [t if t.parameters else await self._tool(t, f"tools[{i}]") for i, t in enumerate(request.tools)]
        return msgspec.structs.replace(request, tools=known)

    async def _tool(self, tool: Tool, where: str) -> Tool:
        """Return the tool as the deployment declares it, or else as the request defines it.

        Raises RequestInvalid for a tool that its MCP server does not list, and for a bare name that is not declared.
        """
        if tool.name in self._tools:
            return self._tools[tool.name]
        problem, known = None, set(self._tools)
        for server, prefix in self._mcp_prefixes.items():
            if tool.name.startswith(prefix):
                listed = await retry_until_available(
                    self._server, partial(self._listed.read, server), what="tools of MCP servers"
                )
                known.update(listed or ())
                if listed and tool.name in listed:
                    return listed[tool.name]
                if prefix:
                    lists = f"lists no tool {tool.name[len(prefix) :]!r}" if listed else "has listed no tools yet"
                    problem = f"the MCP server {server!r} {lists}"
        if problem:
            raise RequestInvalid(where, problem)
        if tool.description is None:
            meant = f"; did you mean {close!r}?" if (close := nearest(tool.name, known)) else ""
            problem = f"no tool {tool.name!r} is declared here, and the request has its name alone{meant}"
            raise RequestInvalid(where, problem)
        return tool

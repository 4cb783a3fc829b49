"""The tools that the settings declare, ready to run: each resolved and checked once, at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import httpx

from tokenbus.errors import SettingsError
from tokenbus_services.settings import HttpTool, LimitSettings, McpHttp, McpSettings, McpStdio, PythonTool, ToolSettings
from tokenbus_services.tools.declared import NAME, Declared, Tool
from tokenbus_services.tools.http import EndpointTool
from tokenbus_services.tools.python import CallableTool
from tokenbus_services.tools.redaction import Redaction
from tokenbus_services.tools.schemas import compile_schema
from tokenbus_services.tools.threads import Threads
from tokenbus_services.tools.unfolding import SchemaError

if TYPE_CHECKING:
    from tokenbus_services.tools.mcp.servers import McpServers


class ToolRegistry:
    """All tools by name, with what they share: threads, HTTP connections, secrets to keep."""

    def __init__(
        self,
        tools: Mapping[str, ToolSettings],
        mcp: Mapping[str, McpSettings] | None = None,
        *,
        env: Mapping[str, str],
        calls_at_once: int,
        message_bytes: int = LimitSettings().mcp_message_bytes,
        source: str = "settings",
    ) -> None:
        """Raises SettingsError, naming the tool and what is wrong with it; ``source`` is where they are declared."""
        servers = mcp or {}
        self.threads = Threads(calls_at_once)
        self._calls_at_once = calls_at_once
        self._http: httpx.AsyncClient | None = None
        secret = [
            name
            for asked in (*tools.values(), *servers.values())
            if isinstance(asked, HttpTool | McpHttp)
            for name in asked.header_env.values()
        ]
        secret += [name for asked in servers.values() if isinstance(asked, McpStdio) for name in asked.env_pass]
        self.redact = Redaction(env, secret)
        self._declared = {name: self._declare(name, tool, env, source) for name, tool in tools.items()}
        self.mcp = _mcp_servers(servers, env, message_bytes, source) if servers else None

    def get(self, name: str) -> Declared | None:
        """The tool of this name; a declared one before one that a server lists."""
        return self._declared.get(name) or (self.mcp.get(name) if self.mcp else None)

    @property
    def names(self) -> list[str]:
        """All of them."""
        return sorted({*self._declared, *(self.mcp.names if self.mcp else ())})

    async def open(self) -> None:
        """Start the MCP servers; returns when each has listed its tools, or could not."""
        if self.mcp:
            await self.mcp.open()

    async def aclose(self) -> None:
        """Close the connections, and end the servers that run as children."""
        if self.mcp:
            await self.mcp.aclose()
        if self._http is not None:
            await self._http.aclose()

    def _declare(self, name: str, settings: ToolSettings, env: Mapping[str, str], source: str) -> Declared:
        where = f"tools.{name}"
        if not NAME.fullmatch(name):
            raise SettingsError(source, where, "a tool's name has 1 to 64 letters, digits, _ and -")
        try:
            schema = compile_schema(settings.parameters)
        except SchemaError as e:
            raise SettingsError(source, f"{where}.parameters", str(e)) from None
        try:
            return Declared(self._tool(name, settings, env), schema, settings.timeout_s)
        except ValueError as e:
            field = ".call" if isinstance(settings, PythonTool) else ""
            raise SettingsError(source, f"{where}{field}", str(e)) from e

    def _tool(self, name: str, settings: ToolSettings, env: Mapping[str, str]) -> Tool:
        match settings:
            case PythonTool():
                return CallableTool(name, settings.call, settings.parameters, self.threads)
            case HttpTool():
                return EndpointTool(name, settings, env, self._connections())

    def _connections(self) -> httpx.AsyncClient:
        """One pool for all endpoints."""
        if self._http is None:
            most = self._calls_at_once
            self._http = httpx.AsyncClient(
                # A call as a whole has a timeout of its own; only a connect shall not use it up.
                timeout=httpx.Timeout(None, connect=10.0),
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            )
        return self._http


def _mcp_servers(
    servers: Mapping[str, McpSettings], env: Mapping[str, str], message_bytes: int, source: str
) -> McpServers:
    try:
        from tokenbus_services.tools.mcp.servers import McpServers
    except ModuleNotFoundError as e:
        problem = f"needs the extra `mcp`: pip install 'tokenbus[services,mcp]' ({e})"
        raise SettingsError(source, f"mcp.{next(iter(servers))}", problem) from None
    return McpServers(servers, env=env, message_bytes=message_bytes, source=source)

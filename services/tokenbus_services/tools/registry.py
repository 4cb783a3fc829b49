"""The tools declared in the settings, resolved and validated once at startup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tokenbus.bus.liveness import Liveness
from tokenbus.errors import SettingsError
from tokenbus_services.json_schema import SchemaError, compile_schema
from tokenbus_services.redaction.redactor import LEARNED, Redaction, named_secret
from tokenbus_services.settings import HttpTool, LimitSettings, McpSettings, McpStdio, PythonTool, ToolSettings
from tokenbus_services.tools.environment import passed_value
from tokenbus_services.tools.http import EndpointTool, Learn
from tokenbus_services.tools.python.executors import PythonExecutors, PythonFunctionTool
from tokenbus_services.tools.tool import NAME, Declared, Tool

if TYPE_CHECKING:
    from tokenbus_services.tools.mcp.registry import McpServers


class ToolRegistry:
    """All tools by name, with their shared resources: executors, HTTP connections, secrets to redact."""

    def __init__(
        self,
        tools: Mapping[str, ToolSettings],
        mcp: Mapping[str, McpSettings] | None = None,
        *,
        env: Mapping[str, str],
        calls_at_once: int,
        message_bytes: int = LimitSettings().mcp_message_bytes,
        source: str = "settings",
        executors: PythonExecutors | None = None,
    ) -> None:
        """Raises SettingsError, naming the tool and the problem. ``source``: where the tools are declared.
        ``executors``: where Python tools run; None: in this process.
        """
        servers = mcp or {}
        self._executors = executors
        self._calls_at_once = calls_at_once
        self._endpoints: list[EndpointTool] = []
        secret = named_secret(env)
        passed = {
            passed_value(name, env)
            for server in servers.values()
            if isinstance(server, McpStdio)
            for name in server.env_pass
        }
        self.redact_result = Redaction(secret)
        """Redacts secrets from tool results."""
        self.redact = Redaction(secret | passed)
        """Redacts secrets from error texts, and also everything passed to MCP servers. The latter may not be secret and
        so may appear in results.
        """
        self._declared = {name: self._declare(name, tool, env, source) for name, tool in tools.items()}
        self.mcp = _mcp_servers(servers, env, message_bytes, source, self._learn) if servers else None

    def _learn(self, secrets: Iterable[str]) -> None:
        found = list(secrets)
        for redaction in (self.redact_result, self.redact, LEARNED):
            redaction.learn(found)

    def get(self, name: str) -> Declared | None:
        """Return the tool of this name. Declared tools take precedence over those listed by MCP servers."""
        return self._declared.get(name) or (self.mcp.get(name) if self.mcp else None)

    @property
    def names(self) -> list[str]:
        """The names of all tools."""
        return sorted({*self._declared, *(self.mcp.names if self.mcp else ())})

    @property
    def processes(self) -> int:
        """Number of processes in which Python tools run."""
        return self._executors.count if self._executors else 0

    async def open(self, liveness: Liveness | None = None) -> None:
        """Start the executors and the MCP servers, which list their tools later. Raises SettingsError if a Python tool
        cannot be loaded; OSError.
        """
        if self._executors:
            await self._executors.open(liveness or Liveness())
        if self.mcp:
            self.mcp.open(liveness or Liveness())

    async def aclose(self) -> None:
        """Close the connections, and stop the executors and the MCP servers that run as child processes."""
        if self._executors:
            await self._executors.close()
        if self.mcp:
            await self.mcp.aclose()
        for endpoint in self._endpoints:
            await endpoint.aclose()

    def _declare(self, name: str, settings: ToolSettings, env: Mapping[str, str], source: str) -> Declared:
        where = f"tools.{name}"
        if not NAME.fullmatch(name):
            raise SettingsError(source, where, "a tool name must have 1 to 64 letters, digits, _ or -")
        try:
            schema = compile_schema(settings.parameters)
        except SchemaError as e:
            raise SettingsError(source, f"{where}.parameters", str(e)) from None
        if settings.format and settings.parameters:
            raise SettingsError(source, f"{where}.format", "a tool has `parameters` or a `format`, not both")
        try:
            return Declared(self._tool(name, settings, env), schema, settings.timeout_s, settings.format is not None)
        except ValueError as e:
            field = ".call" if isinstance(settings, PythonTool) else ""
            raise SettingsError(source, f"{where}{field}", str(e)) from e

    def _tool(self, name: str, settings: ToolSettings, env: Mapping[str, str]) -> Tool:
        match settings:
            case PythonTool():
                return PythonFunctionTool(name, settings, self._executors)
            case HttpTool():
                endpoint = EndpointTool(name, settings, env, connections=self._calls_at_once, learn=self._learn)
                self._endpoints.append(endpoint)
                return endpoint


def _mcp_servers(
    servers: Mapping[str, McpSettings], env: Mapping[str, str], message_bytes: int, source: str, learn: Learn
) -> McpServers:
    try:
        from tokenbus_services.tools.mcp.registry import McpServers
    except ModuleNotFoundError as e:
        problem = f"needs the extra `mcp` of tokenbus (from a checkout: pip install '.[services,mcp]'): {e}"
        raise SettingsError(source, f"mcp.{next(iter(servers))}", problem) from None
    return McpServers(servers, env=env, message_bytes=message_bytes, source=source, learn=learn)

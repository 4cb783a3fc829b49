"""The tools that the settings declare, ready to run: each resolved and checked once, at start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import httpx

from tokenbus.errors import SettingsError
from tokenbus_services.settings import HttpTool, PythonTool, ToolSettings
from tokenbus_services.tools.calls import Text, ToolCall, ToolContext, ToolOutcome
from tokenbus_services.tools.http import EndpointTool
from tokenbus_services.tools.python import CallableTool
from tokenbus_services.tools.redaction import Redaction
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.schemas import Schema, compile_schema
from tokenbus_services.tools.threads import Threads
from tokenbus_services.tools.unfolding import SchemaError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every provider takes as the name of a tool."""


class Tool(Protocol):
    """A way to run one tool."""

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results
    ) -> Text | ToolOutcome:
        """The result: at hand, or handed to ``results`` while it arrived. Raises ToolFailure."""
        ...


class Declared(NamedTuple):
    """One tool of the settings."""

    tool: Tool
    schema: Schema
    timeout_s: float | None


class ToolRegistry:
    """All tools by name, with what they share: threads, HTTP connections, secrets to keep."""

    def __init__(
        self, tools: Mapping[str, ToolSettings], *, env: Mapping[str, str], calls_at_once: int, source: str = "settings"
    ) -> None:
        """Raises SettingsError, naming the tool and what is wrong with it; ``source`` is where they are declared."""
        self.threads = Threads(calls_at_once)
        self._calls_at_once = calls_at_once
        self._http: httpx.AsyncClient | None = None
        secret = [name for tool in tools.values() if isinstance(tool, HttpTool) for name in tool.header_env.values()]
        self.redact = Redaction(env, secret)
        self._declared = {name: self._declare(name, tool, env, source) for name, tool in tools.items()}

    def get(self, name: str) -> Declared | None:
        """The tool of this name."""
        return self._declared.get(name)

    @property
    def names(self) -> list[str]:
        """All of them."""
        return sorted(self._declared)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()

    def _declare(self, name: str, settings: ToolSettings, env: Mapping[str, str], source: str) -> Declared:
        where = f"tools.{name}"
        if not _NAME.fullmatch(name):
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

"""Tools and MCP servers."""

from __future__ import annotations

from typing import Literal

from tokenbus_services.settings.types import Seconds, Table

DEFAULT_TOOL_TIMEOUT_S = 60.0
"""Of a tool call, where neither the tool nor the request says."""


class PythonTool(Table, frozen=True, kw_only=True, tag="python", tag_field="kind"):
    """A Python callable, `module:function`, sync or async."""

    call: str
    description: str = ""
    parameters: dict[str, object] = {}
    timeout_s: Seconds | None = None


class _Reach(Table, frozen=True, kw_only=True):
    """Which addresses may be called beside public ones."""

    allow_private: bool = False
    """Loopback and private ones too. A name that has only others is refused."""
    allow_networks: tuple[str, ...] = ()
    """These too, in CIDR notation; the only way to a link-local or cloud metadata address."""


class HttpTool(_Reach, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An HTTP endpoint: the arguments are the JSON body, the answer is the result."""

    url: str
    method: Literal["POST", "PUT", "GET"] = "POST"
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable that holds its value (a token, say)."""
    description: str = ""
    parameters: dict[str, object] = {}
    timeout_s: Seconds | None = None


ToolSettings = PythonTool | HttpTool


class McpStdio(Table, frozen=True, kw_only=True, tag="stdio", tag_field="kind"):
    """An MCP server that runs as a child of each tool executor."""

    command: str
    args: tuple[str, ...] = ()
    env_pass: tuple[str, ...] = ()
    """Environment variables that it gets, beside PATH, HOME and their like."""
    prefix: str | None = None
    """What its tools' names begin with; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """To start and list its tools."""
    timeout_s: Seconds | None = None
    """For each call."""


class McpHttp(_Reach, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An MCP server behind Streamable HTTP."""

    url: str
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable that holds its value (a token, say)."""
    prefix: str | None = None
    """What its tools' names begin with; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """To connect and list its tools."""
    timeout_s: Seconds | None = None
    """For each call."""


McpSettings = McpStdio | McpHttp

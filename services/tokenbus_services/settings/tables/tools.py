"""Tools and MCP servers."""

from __future__ import annotations

from typing import Literal

from tokenbus.events.requests import InputFormat
from tokenbus_services.settings.types import ImportPath, Seconds, Table

DEFAULT_TOOL_TIMEOUT_S = 60.0
"""Timeout of a tool call if neither the tool nor the request sets one."""


class PythonTool(Table, frozen=True, kw_only=True, tag="python", tag_field="kind"):
    """A Python callable, `module:function`, sync or async."""

    call: str
    description: str = ""
    parameters: dict[str, object] = {}
    format: InputFormat | None = None
    """Set if the input is free text instead of JSON; the tool gets it as its argument ``input``."""
    timeout_s: Seconds | None = None


class _Reach(Table, frozen=True, kw_only=True):
    """Addresses that may be called in addition to public ones."""

    allow_private: bool = False
    """Also allow loopback and private addresses. A name that resolves only to other addresses is rejected."""
    allow_networks: tuple[str, ...] = ()
    """Also allow these networks, in CIDR notation; the only way to reach a link-local or cloud metadata address."""


class HttpTool(_Reach, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An HTTP endpoint: the arguments are the JSON body, the response is the result."""

    url: str
    method: Literal["POST", "PUT", "GET"] = "POST"
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable with its value (a token, say)."""
    signing_env: str | None = None
    """Environment variable with a secret. If set, each call carries the run's id, tenant and metadata, signed."""
    description: str = ""
    parameters: dict[str, object] = {}
    format: InputFormat | None = None
    """Set if the input is free text instead of JSON; the tool gets it as its argument ``input``."""
    timeout_s: Seconds | None = None


ToolSettings = PythonTool | HttpTool


class McpStdio(Table, frozen=True, kw_only=True, tag="stdio", tag_field="kind"):
    """An MCP server that runs as a child process of each tool executor."""

    command: str
    args: tuple[str, ...] = ()
    env_pass: tuple[str, ...] = ()
    """Environment variables passed to it, in addition to PATH, HOME and the like."""
    prefix: str | None = None
    """Prefix of its tools' names; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """Timeout to start and list its tools."""
    timeout_s: Seconds | None = None
    """Timeout of each call."""


class McpHttp(_Reach, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An MCP server reached over Streamable HTTP."""

    url: str
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable with its value (a token, say)."""
    prefix: str | None = None
    """Prefix of its tools' names; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """Timeout to connect and list its tools."""
    timeout_s: Seconds | None = None
    """Timeout of each call."""


McpSettings = McpStdio | McpHttp


# Policies, and the runs they apply to.


class PolicySettings(Table, frozen=True, kw_only=True):
    """A policy that can apply to runs. See docs/guides/policy-stage.md."""

    use: ImportPath
    """`module:Class`, a `tokenbus.policy` StreamProcessor, or `module:function`. The module may be in the directory of
    the settings file."""
    options: dict[str, object] = {}
    """Options declared by the class."""
    on_error: Literal["block", "pass"] = "block"
    """What happens to a run if its policy fails: it ends, or continues without the policy."""
    timeout_s: Seconds = 30.0
    """Timeout of each policy call."""


class PolicyRoute(Table, frozen=True, kw_only=True):
    """Which runs have policies. Criteria left out match every run. A run that matches several routes gets the policies
    of all, in this order.
    """

    policies: tuple[str, ...]
    """Names from `[policies.NAME]`, in the order in which they judge."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """Exact names, or prefixes followed by `*` (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Values of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Text values that the run's metadata must contain."""

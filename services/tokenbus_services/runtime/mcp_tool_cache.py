"""The tool lists of MCP servers, stored on the server: written by tool executors, read by intake.

One key per MCP server, so any number of executors may write it and reads need no search. It outlives an executor's
restart. Without an executor, requests are refused because the tool is not listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.error_info import IN_ANSWER, ErrorInfo
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


def hint(provider: str, error: ErrorInfo) -> str | None:
    """A hint for errors that settings cause or can fix."""
    table = f"[providers.{provider}]"
    match error.code, error.kind:
        case "key_missing", _:
            return f"set {error.where or 'its key'} where the fetcher runs, or api_key_env or api_key_file in {table}"
        case "key_unusable", _:
            return f"{error.where or 'its key'} does not hold a key that can be sent: look for spaces and line ends"
        case "limit_wait", _:
            return "this deployment's own limits held the run back: raise those of the provider, model or tenant"
        case _, "auth":
            return f"the provider refuses the key or its account: look at api_key_env or api_key_file in {table}"
        case _, "not_found":
            return f"the provider has no such model or path: look at the model's name, and base_url in {table}"
        case "network", _ if error.where == IN_ANSWER:
            return "the connection breaks in the middle of answers: look at the provider's state and at proxies"
        case "network", _:
            return f"the connection fails or breaks: look at base_url in {table}, DNS, proxies and firewalls"
        case "connect_timeout", _:
            return f"the provider cannot be reached: look at base_url in {table}, DNS, proxies and firewalls"
        case "stream_cut", _:
            return f"the answer ended too early: look at the provider's state, and at base_url in {table} and proxies"
        case (("first_event_timeout" | "idle_timeout") as code, _):
            return f"the provider went silent: look at its state and at proxies, or raise {code}_s in {table}"
        case (("no_progress" | "call_timeout") as code, _):
            setting = "progress_timeout_s" if code == "no_progress" else f"{code}_s"
            return f"the provider keeps calls open for very long: look at its state, or raise {setting} in {table}"
        case _, "rate_limit":
            return f"the provider limits this account: set [limits.providers.{provider}] or a fallback, or ask for more"
        case _:
            return None

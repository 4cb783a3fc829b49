"""Converts an MCP server's tool list into tools for models. A server may list anything, so everything is bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import mcp_types as types
import msgspec
import structlog

from tokenbus.events.requests import Tool
from tokenbus_services.json_schema.check import Schema, compile_schema
from tokenbus_services.json_schema.size import SchemaError
from tokenbus_services.tools.tool import NAME

MAX_TOOLS = 256
"""Maximum tools of one server."""
MAX_LISTED_BYTES = 2**20
"""Maximum size of all definitions of one server, as JSON."""
MAX_DESCRIPTION_CHARS = 8000

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")

_log = structlog.stdlib.get_logger()


class Listed(NamedTuple):
    """One tool of a server."""

    definition: Tool
    """As a request would list it."""
    remote_name: str
    """The server's own name for the tool."""
    schema: Schema


def usable(server: str, prefix: str, tools: Iterable[types.Tool]) -> dict[str, Listed]:
    """Return the usable tools by the names that models see. Others are skipped and logged.

    A name is the prefix plus the server's own name, with `_` in place of characters that providers do not accept.
    """
    found: dict[str, Listed] = {}
    room = MAX_LISTED_BYTES
    for tool in tools:
        name = prefix + _NOT_IN_A_NAME.sub("_", tool.name)
        description = (tool.description or tool.title or "")[:MAX_DESCRIPTION_CHARS]
        definition = Tool(name=name, description=description or None, parameters=tool.input_schema)
        try:
            schema = _check(definition, known=found)
            size = len(msgspec.json.encode(definition))
            if len(found) >= MAX_TOOLS or size > room:
                raise ValueError(f"over {MAX_TOOLS} tools or {MAX_LISTED_BYTES} bytes of definitions")
        except ValueError as e:
            _log.warning("mcp_tool_skipped", server=server, tool=tool.name[:80], problem=str(e))
            continue
        room -= size
        found[name] = Listed(definition, tool.name, schema)
    return found


def _check(definition: Tool, known: dict[str, Listed]) -> Schema:
    """Validate a tool and compile its schema. Raises ValueError."""
    if not NAME.fullmatch(definition.name):
        raise ValueError("with its prefix, the name must have 1 to 64 letters, digits, _ or -")
    if definition.name in known:
        raise ValueError("another tool of the server maps to the same name")
    try:
        return compile_schema(definition.parameters)
    except SchemaError as e:
        raise ValueError(f"inputSchema: {e}") from None

"""Converts an MCP server's tool list into tools for models. A server may list anything, so everything is bounded."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterable
from typing import NamedTuple

import mcp_types as types
import msgspec
import structlog

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, parse_media_type
from tokenbus.errors import BlobRefused, ToolFailure
from tokenbus.events.requests import Tool
from tokenbus_services.json_schema import Schema, SchemaError, compile_schema
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool import NAME
from tokenbus_services.tools.tool_call import ToolOutcome

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


MAX_BLOBS = 16
"""Maximum blobs of one result; further content is only mentioned."""


async def outcome_of(tool: str, result: types.CallToolResult, results: Results) -> ToolOutcome:
    """Convert the parts in order, each on its own lines. Raises ToolFailure if the result is an error."""
    parts: list[ToolOutcome] = []
    kept = 0
    for part in result.content:
        match part:
            case types.ImageContent() | types.AudioContent():
                content, media_type = part.data, part.mime_type
            case types.EmbeddedResource(resource=types.BlobResourceContents() as resource):
                content, media_type = resource.blob, resource.mime_type
            case _:
                parts.append(ToolOutcome(_text(part)))
                continue
        kept += 1
        if kept > MAX_BLOBS:
            parts.append(ToolOutcome(f"[{(media_type or 'content')[:80]}, not kept: over {MAX_BLOBS} in one result]"))
        else:
            parts.append(await _blob(tool, content, media_type, results))
    if not parts and result.structured_content is not None:
        parts.append(ToolOutcome(msgspec.json.encode(result.structured_content).decode()))
    if result.is_error:
        whole = "\n".join(part.content for part in parts)
        raise ToolFailure(tool, "tool_error", whole or "the tool failed without an error message")
    return await results.joined(parts)


def _text(part: types.ContentBlock) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.ResourceLink():
            return f"[resource {part.name}: {part.uri}]"
        case _:
            return f"[{part.type}]"


async def _blob(tool: str, data: str, media_type: str | None, results: Results) -> ToolOutcome:
    try:
        content = b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ToolFailure(tool, "bad_result", "the result contains invalid base64") from None
    try:
        known = parse_media_type(media_type or DEFAULT_MEDIA_TYPE)
    except BlobRefused:
        known = DEFAULT_MEDIA_TYPE
    return await results.blob(content, known)

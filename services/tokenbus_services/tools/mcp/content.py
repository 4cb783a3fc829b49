"""Converts MCP results into what the model sees: texts verbatim, other content as blobs with a note in their place."""

from __future__ import annotations

import binascii
from base64 import b64decode

import mcp_types as types
import msgspec

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, parse_media_type
from tokenbus.errors import BlobRefused, ToolFailure
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import ToolOutcome

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

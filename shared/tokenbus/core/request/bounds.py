"""Bounds of a request: every count, length and size that the overall byte limit does not bound enough.

The bounds are far above what any provider accepts. They protect tokenbus, which stores a copy in every `started` event,
uses values as hash keys, compiles schemas and searches streams for stop strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from uuid import UUID

import msgspec

from tokenbus.events.requests import (
    TRACEPARENT_PATTERN,
    DocumentPart,
    FileSource,
    Generate,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000
"""Per message and per tool result."""
MAX_TOOLS = 512
MAX_STOPS = 64
MAX_STOP_CHARS = 1_024
MAX_SCHEMA_BYTES = 128 * 1024
"""JSON size of one tool's parameters or of the answer's schema."""
MAX_DESCRIPTION_CHARS = 64 * 1024
MAX_METADATA_BYTES = 64 * 1024
MAX_EXTRA_BYTES = 1024 * 1024
MAX_NAME_CHARS = 1_024
"""Limit for participants, tool ids and names in messages, and document titles."""
MAX_URL_CHARS = 16 * 1024
MAX_OPAQUE = 64
"""Fields of a part's `opaque`, and of its `opaque_blobs`."""
MAX_SECONDS = 30 * 86_400.0
MAX_TOKENS = 2**31 - 1


def over_bounds(request: Generate) -> Iterator[tuple[str, str]]:
    """Each place where the request exceeds a bound, with the problem."""
    yield from _count("messages", len(request.messages), MAX_MESSAGES, "messages")
    yield from _count("tools", len(request.tools), MAX_TOOLS, "tools")
    yield from _count("stop", len(request.stop), MAX_STOPS, "stop strings")
    for i, stop in enumerate(request.stop):
        yield from _count(f"stop[{i}]", len(stop), MAX_STOP_CHARS, "characters")
    for i, tool in enumerate(request.tools):
        yield from _count(f"tools[{i}].description", len(tool.description or ""), MAX_DESCRIPTION_CHARS, "characters")
        yield from _size(f"tools[{i}].parameters", tool.parameters, MAX_SCHEMA_BYTES)
    if request.output_schema:
        yield from _size("output_schema.schema", request.output_schema.schema, MAX_SCHEMA_BYTES)
    yield from _size("metadata", request.metadata, MAX_METADATA_BYTES)
    yield from _size("extra", request.extra, MAX_EXTRA_BYTES)
    yield from _count("participant", len(request.participant or ""), MAX_NAME_CHARS, "characters")
    if isinstance(request.system, list):
        yield from _count("system", len(request.system), MAX_PARTS, "parts")
    for name, seconds in (("deadline_s", request.deadline_s), ("tool_timeout_s", request.tool_timeout_s)):
        if (seconds or 0) > MAX_SECONDS:
            yield name, f"over {MAX_SECONDS:g} seconds"
    if (request.max_tokens or 0) > MAX_TOKENS:
        yield "max_tokens", f"over {MAX_TOKENS}"
    if request.prefill:
        yield from _count("prefill.unnamed", len(request.prefill.unnamed), MAX_MESSAGES, "names")
    if request.images and request.images.mask:
        yield from _part("images.mask", request.images.mask)
    for i, message in enumerate(request.messages):
        yield from message_over_bounds(f"messages[{i}]", message)


def message_over_bounds(where: str, message: Message) -> Iterator[tuple[str, str]]:
    """Each place where one message exceeds a bound, with the problem."""
    yield from _count(f"{where}.participant", len(message.participant or ""), MAX_NAME_CHARS, "characters")
    if isinstance(message.content, str):
        return
    yield from _count(f"{where}.content", len(message.content), MAX_PARTS, "parts")
    for i, part in enumerate(message.content):
        yield from _part(f"{where}.content[{i}]", part)


def _part(where: str, part: object) -> Iterator[tuple[str, str]]:
    match part:
        case TextPart() | ThinkingPart() | ToolCallPart() | ImagePart():
            yield from _count(f"{where}.opaque", len(part.opaque or {}), MAX_OPAQUE, "fields")
            yield from _count(f"{where}.opaque_blobs", len(part.opaque_blobs or {}), MAX_OPAQUE, "fields")
        case _:
            pass
    match part:
        case ImagePart(source=UrlSource(url=url)) | DocumentPart(source=UrlSource(url=url)):
            yield from _count(f"{where}.source.url", len(url), MAX_URL_CHARS, "characters")
        case ImagePart(source=FileSource(file_id=file_id)) | DocumentPart(source=FileSource(file_id=file_id)):
            yield from _count(f"{where}.source.file_id", len(file_id), MAX_URL_CHARS, "characters")
        case _:
            pass
    match part:
        case ToolCallPart() | ToolResultPart():
            yield from _count(f"{where}.tool_id", len(part.tool_id), MAX_NAME_CHARS, "characters")
            yield from _count(f"{where}.tool_name", len(part.tool_name or ""), MAX_NAME_CHARS, "characters")
        case DocumentPart():
            yield from _count(f"{where}.title", len(part.title or ""), MAX_NAME_CHARS, "characters")
        case _:
            pass
    if isinstance(part, ToolResultPart) and not isinstance(part.content, str):
        yield from _count(f"{where}.content", len(part.content), MAX_PARTS, "parts")
        for i, inner in enumerate(part.content):
            yield from _part(f"{where}.content[{i}]", inner)


def _count(where: str, found: int, most: int, what: str) -> Iterator[tuple[str, str]]:
    if found > most:
        yield where, f"{found} {what}, at most {most}"


def _size(where: str, value: dict[str, object] | None, most: int) -> Iterator[tuple[str, str]]:
    if value:
        yield from _count(where, len(msgspec.json.encode(value)), most, "bytes as JSON")


MAX_TENANT_CHARS = 128


def tenant_of(metadata: Mapping[str, object] | None) -> str:
    """The tenant in a request's metadata, stripped; empty if there is none. `check_request` ensures that it is text."""
    tenant = (metadata or {}).get("tenant")
    return tenant.strip() if isinstance(tenant, str) else ""


TRACEPARENT = re.compile(TRACEPARENT_PATTERN)


def is_traceparent(text: str) -> bool:
    return TRACEPARENT.fullmatch(text) is not None


# Run ids for requests without one: UUIDv7 (RFC 9562 section 5.7), which sorts by creation time.

RANDOM_BITS = 74


def uuid7(unix_ms: int, rest: int) -> str:
    """UUIDv7 of a time and 74 further bits; deterministic. Sorts by time, then by ``rest``."""
    a, b = divmod(rest & ((1 << RANDOM_BITS) - 1), 1 << 62)
    value = (unix_ms & ((1 << 48) - 1)) << 80 | 7 << 76 | a << 64 | 0b10 << 62 | b
    return str(UUID(int=value))


def id_of_entry(stream: str, entry_id: str) -> str:
    """Run id for a request without one, derived from its stream and entry id.

    An entry that is delivered twice, because its first reader died between accepting and acknowledging it, therefore
    gets the same run both times.
    """
    digest = sha256(f"{stream}\0{entry_id}".encode()).digest()
    return uuid7(int(entry_id.partition("-")[0]), int.from_bytes(digest[:10], "big"))

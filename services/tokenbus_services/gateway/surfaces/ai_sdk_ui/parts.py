"""Parts of the AI SDK's UI message stream as bytes, and the values inside them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import AudioRef, BlockComplete, ImageRef
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.surfaces.contract import blob_path, encode_line

Part = dict[str, object]
DONE = b"data: [DONE]\n\n"
METADATA = "tokenbus"
"""Key of our values in `providerMetadata`, which clients send back with their messages."""
ITEM = "data-tokenbus-item"
"""Type of a part with an item of the provider's, as it came."""
VOID: Part = {"providerMetadata": {METADATA: {"void": True}}}
"""Of a part that a retry voided."""

FINISH: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content-filter",
    "tool_use": "tool-calls",
    "error": "error",
    "pause": "other",
    "requires_action": "other",
    "unknown": "other",
}

CUT = "The answer was cut short."


def written(part: Part) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_line(part) + b"\n\n"


def provider_metadata(complete: BlockComplete, **more: object) -> Part:
    """What the provider wants back with a block, in the form that the client returns it; empty if there is nothing."""
    values = {
        "signature": complete.signature,
        "opaque": complete.opaque,
        "opaque_blobs": complete.opaque_blobs,
        "cut": complete.cut,
        **more,
    }
    kept = {name: value for name, value in values.items() if value}
    return {"providerMetadata": {METADATA: kept}} if kept else {}


def usage(total: Usage) -> Part:
    """Token counts, named as in the AI SDK."""
    counts = {
        "inputTokens": total.input,
        "outputTokens": total.output,
        "reasoningTokens": total.reasoning,
        "cachedInputTokens": total.cache_read,
        "totalTokens": total.total,
    }
    return {name: count for name, count in counts.items() if count is not None}


def media_url(run: str, media: ImageRef | AudioRef) -> str | None:
    """A `data:` url, or that of a blob at this gateway; None if an image or a sound is in neither form."""
    if media.base64 is not None:
        return f"data:{media.media_type};base64,{media.base64}"
    return blob_path(run, media.blob_id) if media.blob_id else None

"""What stream and whole answer have in common: stop reasons and token counts of the Messages API. Pure."""

from __future__ import annotations

from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, Completed
from tokenbus_services.gateway.surfaces.answering import Echo
from tokenbus_services.gateway.surfaces.signatures import pack
from tokenbus_services.pricing.token_counts import token_counts

Json = dict[str, object]

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_use": "tool_use",
    "content_filter": "refusal",
    "pause": "pause_turn",
    "requires_action": "end_turn",
    "unknown": "end_turn",
    "error": "end_turn",
}
_OWN = {"signature", "redacted", "api", "provider"}
"""What a thinking block of the Messages API may have beside its text, and the origin."""


def ending(end: Completed, echo: Echo) -> Json:
    """Why the message ends. If calls of the bus's tools are left over, the API's word for its own tools applies."""
    if end.stop_string and end.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    reason = "pause_turn" if end.finish == "tool_use" and echo.bus_tools else _STOP_REASONS[end.finish]
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(end: Completed, echo: Echo) -> Json:
    """The run's counts."""
    counts = token_counts(end.usage, echo.api_of(end))
    usage: Json = {
        "input_tokens": counts.fresh,
        "cache_creation_input_tokens": counts.cache_write,
        "cache_read_input_tokens": counts.cache_read,
        "output_tokens": counts.output,
    }
    if counts.reasoning:
        usage["output_tokens_details"] = {"thinking_tokens": counts.reasoning}
    return usage


def signature_of(block: BlockComplete) -> str:
    """The signature of a thinking block; of another API, all that its provider wants back."""
    opaque = block.opaque or {}
    if not set(opaque) <= _OWN or opaque.get("api", "anthropic") != "anthropic":
        return pack({**opaque, **({"signature": block.signature} if block.signature else {})})
    return block.signature or opaque.get("signature", "")


def redacted_of(block: BlockComplete) -> str | None:
    """The data of a redacted thinking block of this API; None for any other block."""
    return None if block.content or block.signature else (block.opaque or {}).get("redacted")


def message_of(run: str, model: str, content: list[Json], **more: object) -> Json:
    """The message object."""
    return {
        "id": f"msg_{run}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        **more,
    }

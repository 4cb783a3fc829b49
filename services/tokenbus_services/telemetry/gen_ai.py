"""Names of OpenTelemetry's GenAI conventions (opentelemetry-semantic-conventions 0.66b2). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.events.requests import Generate, Message
from tokenbus_services.telemetry.trace_context import MAX_CONTENT_CHARS, Value

_BY_API = {"anthropic": "anthropic", "gemini": "gcp.gemini"}
_BY_NAME = {
    "cohere": "cohere",
    "deepseek": "deepseek",
    "groq": "groq",
    "mistral": "mistral_ai",
    "perplexity": "perplexity",
    "xai": "x_ai",
}
"""Vendors that speak another's API, by their usual name in the settings."""


def provider_of(name: str, api: str) -> str:
    """The conventions' name of a configured provider; its own name for an API that they do not know."""
    vendor = _BY_NAME.get(name.lower()) or _BY_API.get(api)
    return vendor or ("openai" if api.startswith("openai-") else name)


def operation_of(api: str) -> str:
    """The conventions' name of a provider call."""
    return "generate_content" if api in ("gemini", "openai-images") else "chat"


def request_attributes(request: Generate, *, content: bool, history: Sequence[Message] = ()) -> dict[str, Value | None]:
    """Attributes of a request; with its messages if ``content``."""
    attributes: dict[str, Value | None] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.presence_penalty": request.presence_penalty,
    }
    if content:
        attributes["gen_ai.input.messages"] = shown_json([*request.messages, *history])
        attributes["gen_ai.system_instructions"] = shown_json(request.system) if request.system else None
    return attributes


def shown_json(value: object) -> str:
    """The value as JSON, cut to `MAX_CONTENT_CHARS`."""
    return msgspec.json.encode(value).decode(errors="replace")[:MAX_CONTENT_CHARS]

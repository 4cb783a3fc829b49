"""Providers by API name."""

from __future__ import annotations

from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Generate
from tokenbus.providers import (
    anthropic,
    gemini,
    gemini_interactions,
    openai_chat,
    openai_images,
    openai_responses,
    plugins,
)
from tokenbus.providers.api import ApiName, Provider

_BUILT_IN: dict[ApiName, Provider] = {
    p.name: p
    for p in (
        anthropic.provider,
        openai_chat.provider,
        openai_responses.provider,
        openai_images.provider,
        gemini.provider,
        gemini_interactions.provider,
    )
}


def get(api: ApiName) -> Provider:
    """Return the provider of an API, built in or from another package.

    Raises SettingsError if it is unknown or cannot be loaded.
    """
    return _BUILT_IN.get(api) or plugins.load(api)


def continues(request: Generate, api: ApiName, quirks: Quirks) -> bool:
    """Whether provider and model can continue a partial answer (`on_failure` continue, `Client.resume`).

    A text that the model continues anyway (prefill mode) can be continued once more; in chat mode the API knows.
    ``quirks`` are those of the model.
    """
    return request.mode == "prefill" or get(api).continues(request, quirks)

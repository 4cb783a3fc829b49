"""Providers by API name."""

from __future__ import annotations

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

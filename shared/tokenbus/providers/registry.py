"""The providers by the API they speak."""

from __future__ import annotations

from tokenbus.errors import SettingsError
from tokenbus.providers import anthropic, gemini, openai_chat, openai_images, openai_responses
from tokenbus.providers.api import ApiName, Provider

_PROVIDERS: dict[ApiName, Provider] = {
    p.name: p
    for p in (
        anthropic.provider,
        openai_chat.provider,
        openai_responses.provider,
        openai_images.provider,
        gemini.provider,
    )
}


def get(api: ApiName) -> Provider:
    """The provider of an API. Raises SettingsError for one that is not built."""
    provider = _PROVIDERS.get(api)
    if provider is None:
        raise SettingsError("providers", "api", f"{api} is not built; there are {', '.join(_PROVIDERS)}")
    return provider

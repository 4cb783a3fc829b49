"""The mock provider of `tokenbus up --mock`: its command, and the settings it adds for the services."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus_services.settings import (
    CONSOLE_ROLES,
    ConsoleSettings,
    GatewaySettings,
    ProviderSettings,
    PythonTool,
    Settings,
)
from tokenbus_services.weather import WEATHER_CALL, WEATHER_DESCRIPTION, WEATHER_PARAMETERS, WEATHER_TOOL

NAME = "mock-provider"
_APIS: tuple[ApiName, ...] = ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
API_PATHS = {api: urlsplit(registry.get(api).default_base_url).path for api in _APIS}
"""The APIs that it supports, with their paths below its address."""
PROVIDER = "mock-anthropic"
# Every worker and `tokenbus up` import this module, and few need the provider: it is imported where it is needed.


def command(port: int) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "tokenbus_services.mock_provider"),
        *("--any-model", "--port", str(port), "--announce", NAME),
    ]


def provider_names() -> list[str]:
    return [f"mock-{api}" for api in API_PATHS]


def with_mock(settings: Settings, url: str) -> Settings:
    """Return the settings plus the demo's tool, a gateway with its console, and providers `mock-anthropic` and so on
    at this address. The gateway lists a model of each. Names that already exist in the settings are kept.
    """
    from tokenbus_services.mock_provider import demo

    weather = PythonTool(
        call=WEATHER_CALL,
        description=WEATHER_DESCRIPTION,
        parameters=WEATHER_PARAMETERS,
    )
    providers = {
        name: ProviderSettings(api=api, base_url=f"{url}{path}", api_key_env="")
        for name, (api, path) in zip(provider_names(), API_PATHS.items(), strict=True)
    }
    listed = GatewaySettings(models=tuple(f"{name}/{demo.DEMO_MODEL}" for name in providers))
    return msgspec.structs.replace(
        with_console(settings),
        gateway=settings.gateway or listed,
        providers={**providers, **settings.providers},
        tools={WEATHER_TOOL: weather, **settings.tools},
    )


def with_console(settings: Settings) -> Settings:
    """Return the settings plus a gateway and its console, in which everybody may do everything: nothing here is real.
    Tables that already exist are kept.
    """
    return msgspec.structs.replace(
        settings,
        gateway=settings.gateway or GatewaySettings(),
        console=settings.console or ConsoleSettings(roles_without_keys=CONSOLE_ROLES),
    )


def completed(options: Mapping[str, str | int]) -> dict[str, str | int]:
    """Return the options of a request, with the demo's in place of those that a mock provider's lack."""
    from tokenbus_services.mock_provider import demo

    if options.get("provider", PROVIDER) not in provider_names():
        return dict(options)
    return {"provider": PROVIDER, "model": demo.DEMO_MODEL, "text": demo.DEMO_PROMPT, **options}


def demo_request() -> dict[str, object]:
    """The default request of `tokenbus send`."""
    from tokenbus_services.mock_provider import demo

    return {
        "type": "generate",
        "provider": PROVIDER,
        "model": demo.DEMO_MODEL,
        "messages": [{"role": "user", "content": demo.DEMO_PROMPT}],
        "tools": [{"name": WEATHER_TOOL}],
        "thinking": {"budget_tokens": 1024},
    }

"""The mock provider of `tokenbus up --mock`: its command, and the settings it adds for the services."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import msgspec

from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.demo import (
    DEMO_MODEL,
    DEMO_PROMPT,
    WEATHER_DESCRIPTION,
    WEATHER_PARAMETERS,
    WEATHER_TOOL,
)
from tokenbus_services.settings import (
    CONSOLE_ROLES,
    ConsoleSettings,
    GatewaySettings,
    ProviderSettings,
    PythonTool,
    Settings,
)

NAME = "mock-provider"
_APIS: tuple[ApiName, ...] = ("anthropic", "openai-chat", "openai-responses", "gemini")
API_PATHS = {api: urlsplit(registry.get(api).default_base_url).path for api in _APIS}
"""The APIs that it supports, with their paths below its address."""
PROVIDER = "mock-anthropic"
MODEL = DEMO_MODEL
WEATHER = PythonTool(
    call=f"tokenbus_services.mock_provider.demo:{WEATHER_TOOL}",
    description=WEATHER_DESCRIPTION,
    parameters=WEATHER_PARAMETERS,
)


def command(port: int) -> list[str]:
    """The command that runs it on this port."""
    return [
        *(sys.executable, "-P", "-m", "tokenbus_services.mock_provider"),
        *("--any-model", "--port", str(port), "--announce", NAME),
    ]


def with_mock(settings: Settings, url: str) -> Settings:
    """Return the settings plus the demo's tool, a gateway with its console, and providers `mock-anthropic` and so on
    at this address. Names that already exist in the settings are kept.
    """
    providers = {
        f"mock-{api}": ProviderSettings(api=api, base_url=f"{url}{path}", api_key_env="")
        for api, path in API_PATHS.items()
    }
    return msgspec.structs.replace(
        with_console(settings),
        providers={**providers, **settings.providers},
        tools={WEATHER_TOOL: WEATHER, **settings.tools},
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


def demo_request() -> dict[str, object]:
    """The default request of `tokenbus send`."""
    return {
        "type": "generate",
        "provider": PROVIDER,
        "model": MODEL,
        "messages": [{"role": "user", "content": DEMO_PROMPT}],
        "tools": [{"name": WEATHER_TOOL}],
        "thinking": {"budget_tokens": 1024},
    }

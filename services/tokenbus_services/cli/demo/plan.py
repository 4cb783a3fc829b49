"""Plans the demo: its request, its provider, and the settings of its services. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import msgspec

from tokenbus.blob_wire import DEPLOYMENT_ENV, URL_ENV
from tokenbus.bus.server.url import URL_ENV as REDIS_URL_ENV
from tokenbus.bus.server.url import URL_FILE_ENV
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Generate, Message, Thinking, Tool
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT, WEATHER_DESCRIPTION, WEATHER_PARAMETERS

MODELS: Final[dict[ApiName, str]] = {
    "anthropic": "claude-haiku-4-5",
    "openai-chat": "gpt-5-mini",
    "openai-responses": "gpt-5-mini",
    "gemini": "gemini-flash-latest",
}
"""The default model per API, for a real provider."""
BASE_URL_ENV: Final[dict[ApiName, str]] = {
    "anthropic": "ANTHROPIC_BASE_URL",
    "openai-chat": "OPENAI_BASE_URL",
    "openai-responses": "OPENAI_BASE_URL",
    "gemini": "GOOGLE_GEMINI_BASE_URL",
}
"""Named as in the vendors' own SDKs."""
_VERSION: Final[dict[ApiName, str]] = {"gemini": "/v1beta"}
"""Appended to a URL from the environment: Google's has no version, but `base_url` includes it."""
REPLAYED: Final[ApiName] = "anthropic"
TOOL: Final = "weather"
_API: Final[dict[str, ApiName]] = {api: api for api in MODELS}
KEY_VARIABLES: Final = frozenset(
    name for api in MODELS for key in [registry.get(api).default_key_env] for name in (key, f"{key}_FILE")
)
"""Variables that may hold provider keys; only the fetcher gets them."""
_OURS = (REDIS_URL_ENV, URL_FILE_ENV, "TOKENBUS_DATA", "TOKENBUS_PARTITIONS", URL_ENV, DEPLOYMENT_ENV)


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which provider and model the demo calls."""

    api: ApiName
    model: str
    replayed: bool
    """Whether the mock provider answers; no key is needed then."""
    base_url: str | None = None
    """The real provider's address; None for its default."""
    thinking: bool = True


def plan_for(provider: str | None, model: str | None, env: Mapping[str, str]) -> DemoPlan:
    """Return the plan for these options. Raises SettingsError if the API is unknown or its key is missing."""
    if provider is None:
        if model is not None:
            raise SettingsError("options", "--model", "needs --provider: the mock provider has one model")
        return DemoPlan(api=REPLAYED, model=DEMO_MODEL, replayed=True)
    api = _API.get(provider)
    if api is None:
        raise SettingsError("options", "--provider", f"{provider!r} is not built; there are {', '.join(MODELS)}")
    variable = registry.get(api).default_key_env
    if not env.get(variable):
        raise SettingsError("environment", variable, f"holds no key; without --provider {api} the demo needs none")
    return DemoPlan(
        api=api,
        model=model or MODELS[api],
        replayed=False,
        base_url=f"{url.rstrip('/')}{_VERSION.get(api, '')}" if (url := env.get(BASE_URL_ENV[api])) else None,
        thinking=api in ("anthropic", "gemini"),  # OpenAI shows thinking only for some models and accounts
    )


def request_of(plan: DemoPlan) -> Generate:
    """Return the demo's request. The tool is declared in the settings, so its name is enough."""
    return Generate(
        provider=plan.api,
        model=plan.model,
        messages=[Message(role="user", content=DEMO_PROMPT)],
        tools=[Tool(name=TOOL)],
        thinking=Thinking(budget_tokens=1024) if plan.thinking else None,
    )


def settings_text(plan: DemoPlan, *, redis_url: str, base_url: str | None, directory: Path, blobs_port: int) -> str:
    """Return the `tokenbus.toml` of the demo's services: free ports, and the tool."""
    provider: dict[str, object] = {"api": plan.api}
    if base_url:
        provider["base_url"] = base_url
    if plan.replayed:
        provider["api_key_env"] = ""
    tool = {
        "kind": "python",
        "call": f"tokenbus_services.mock_provider.demo:{TOOL}",
        "description": WEATHER_DESCRIPTION,
        "parameters": WEATHER_PARAMETERS,
    }
    settings: dict[str, object] = {
        "redis_url": redis_url,
        "data_dir": str(directory),
        "http": {"fetcher": 0, "normalizer": 0, "parser": 0, "tools": 0, "blobs": blobs_port},
        "blobs": {"service_url": f"http://127.0.0.1:{blobs_port}"},
        "providers": {plan.api: provider},
        "tools": {TOOL: tool},
    }
    return "".join(f"{name} = {_toml(value)}\n" for name, value in settings.items())


def environment(env: Mapping[str, str], config: Path) -> dict[str, str]:
    """Return the services' environment: the demo's settings, nothing of the user's own deployment."""
    kept = {name: value for name, value in env.items() if name not in _OURS}
    direct = ",".join(part for part in (env.get("NO_PROXY") or env.get("no_proxy"), "127.0.0.1") if part)
    return {**kept, "TOKENBUS_CONFIG": str(config), "NO_PROXY": direct, "no_proxy": direct}


def _toml(value: object) -> str:
    """Format a value as TOML, with inline tables. JSON strings, numbers and booleans are valid TOML."""
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in cast("list[object]", value)) + "]"
    return json.dumps(value, ensure_ascii=False)

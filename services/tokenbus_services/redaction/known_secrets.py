"""The secrets that a process knows at its start: those of its settings, and those in its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tokenbus.bus.server.url import URL_FILE_ENV, parse_url
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus.secret_env import FILE
from tokenbus_services.settings import HttpTool, McpHttp, McpStdio, Outbound, Settings, WebhookSettings

_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_LONGEST_IN_FILE = 4096
"""A longer file, or one of several lines, is a certificate or the like, which nothing repeats."""


def secrets_of(settings: Settings, env: Mapping[str, str]) -> set[str]:
    """All secrets of a process with these settings: provider keys, header values of tools and the like, variables
    with secret names, and the server's password.
    """
    names = provider_key_variables(settings)
    for called in (*settings.tools.values(), *settings.mcp.values(), *settings.webhooks.values()):
        if isinstance(called, Outbound):
            names |= {*called.header_env.values()}
        if isinstance(called, HttpTool) and called.signing_env:
            names |= {called.signing_env}
        if isinstance(called, WebhookSettings):
            names |= {called.secret_env}
    values = named_secret(env) | {env.get(name, "") for name in names}
    for name in names:
        values.update(key_in_file(env.get(f"{name}{FILE}")))
    for provider in settings.providers.values():
        variable = registry.get(provider.api).default_key_env if provider.api_key_env is None else provider.api_key_env
        values.update(key_in_file(provider.api_key_file or (env.get(f"{variable}{FILE}") if variable else None)))
    values.update(key_in_file(env.get(URL_FILE_ENV)))
    for url in filter(None, (settings.redis_url, env.get("TOKENBUS_REDIS_URL"))):
        with suppress(SettingsError):  # reported when connecting
            values.add(parse_url(url).password or "")
    return values


def key_in_file(path: str | None) -> list[str]:
    """The current key in a file; empty if unreadable, which is reported where the key is needed."""
    try:
        return [Path(path).read_text(encoding="utf-8").strip()] if path else []
    except (OSError, UnicodeDecodeError):
        return []


def provider_key_variables(settings: Settings) -> frozenset[str]:
    """The environment variables that hold provider keys."""
    return frozenset(
        registry.get(p.api).default_key_env if p.api_key_env is None else p.api_key_env
        for p in settings.providers.values()
    ) - {""}


def tool_variables(settings: Settings) -> frozenset[str]:
    """The environment variables passed by name to HTTP tools and MCP servers."""
    names: set[str] = set()
    for tool in (*settings.tools.values(), *settings.mcp.values()):
        match tool:
            case HttpTool():
                names |= {*tool.header_env.values(), *filter(None, [tool.signing_env])}
            case McpHttp():
                names |= {*tool.header_env.values()}
            case McpStdio():
                names |= {*tool.env_pass}
            case _:
                pass
    return frozenset(names)


def named_secret(env: Mapping[str, str]) -> set[str]:
    """The values of all variables with a secret-sounding name; of one that ends in `_FILE`, what its file holds."""
    names = {name for name in env if _SECRET_NAME.search(name)}
    values = {env[name] for name in names if not name.endswith(FILE)}
    for name in names:
        if name.endswith(FILE):
            values.update(v for v in key_in_file(env[name]) if len(v) <= _LONGEST_IN_FILE and "\n" not in v)
    return values

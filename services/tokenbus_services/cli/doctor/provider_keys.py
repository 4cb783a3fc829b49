"""`tokenbus doctor --keys`: asks each provider for its list of models, which needs a valid key and costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import httpx

from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.fetcher.auth import Key, KeyMissing, KeyUnusable
from tokenbus_services.settings import ProviderSettings, Settings

ANSWERS_S = 10.0


async def try_provider_keys(settings: Settings, env: Mapping[str, str]) -> AsyncIterator[Finding]:
    """Try the key of every provider that has one. Uses a proxy from the environment, as fetchers do."""
    async with httpx.AsyncClient(timeout=ANSWERS_S) as client:
        tried = (_try(client, name, provider, env) for name, provider in sorted(settings.providers.items()))
        for finding in await asyncio.gather(*tried):
            if finding:
                yield finding


async def _try(
    client: httpx.AsyncClient, name: str, provider: ProviderSettings, env: Mapping[str, str]
) -> Finding | None:
    about = f"provider {name}"
    try:
        api = registry.get(provider.api)
        headers = {} if provider.auth else Key(name, provider, api, env).headers()
    except (SettingsError, KeyMissing):
        return None  # another check reports it
    except KeyUnusable as e:
        return Finding(level="wrong", about=about, says=str(e), todo="put the key there, alone, without line ends")
    if provider.auth:
        return Finding(level="note", about=about, says=f"{provider.auth} was not tried: only fetchers call it")
    if not headers:
        return None
    path: str = getattr(api, "models_path", "")  # a plug-in need not derive from ProviderBase
    if not path:
        return Finding(level="note", about=about, says=f"its key was not tried: {provider.api} has no free call")
    url = (provider.base_url or api.default_base_url).rstrip("/") + path
    try:
        answer = await client.get(url, headers={**getattr(api, "models_headers", {}), **headers})
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        return Finding(
            level="wrong",
            about=about,
            says=f"its key was not tried, for {url} gave no answer: {str(e) or type(e).__name__}",
            todo="fix base_url, or check this machine's name service, firewall and proxy",
        )
    return key_finding(about, answer.status_code)


def key_finding(about: str, status: int) -> Finding:
    """What the status of the list of models says of the key."""
    if status in (401, 403):
        todo = "replace the key, or fix the rights of its account, where fetchers run"
        return Finding(level="wrong", about=about, says=f"refuses the key: HTTP {status}", todo=todo)
    if status < 300:
        return Finding(level="ok", about=about, says="accepts the key")
    return Finding(level="note", about=about, says=f"did not show whether the key is valid: HTTP {status}")

"""Gathers the facts around the bus: the blob service, the providers' addresses, the disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tokenbus.blob_wire import DEPLOYMENT_HEADER
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.blobs.client import loader_of
from tokenbus_services.cli.doctor import checks_work
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.http_probe import page
from tokenbus_services.cli.inspect.provider_facts import last_failure
from tokenbus_services.cli.render.event_text import size
from tokenbus_services.endpoints.auth import Key, KeyMissing, KeyUnusable
from tokenbus_services.settings import BlobSettings, ProviderSettings, Settings

REACH_S = 5.0
LATELY_S = 600.0
"""How old a failure of the blob store may be."""


async def examine_addresses(settings: Settings) -> list[Finding]:
    """Check that the address of each provider answers."""
    return await asyncio.gather(*(_reach(name, url) for name, url in _addresses(settings)))


async def examine_blobs(settings: BlobSettings, deployment: str) -> list[Finding]:
    """Check the blob service and what it failed lately, or as much of a custom store as is possible without using it.
    ``deployment``: the id with which the service must answer; empty: any.
    """
    if settings.loader is None:
        return await _blob_service(settings.address, deployment)
    try:
        await loader_of(settings).aclose()
    except SettingsError as e:
        return [Finding(level="wrong", about="blobs", says=str(e), todo="fix blobs.loader, or what it names")]
    return [Finding(level="ok", about="blobs", says=f"a store of your own, {settings.loader}")]


async def _blob_service(url: str, deployment: str) -> list[Finding]:
    """Check that a blob service answers, that it is this deployment's, and what it failed lately."""
    try:
        found = await page(f"{url.rstrip('/')}/health")
    except (OSError, ValueError) as e:
        return [check_blobs(url, problem=str(e) or type(e).__name__)]
    try:
        service = msgspec.json.decode(found.body, type=dict[str, Any]).get("service")
    except msgspec.DecodeError:
        service = None
    problem = None
    if service != "blobs":
        problem = f"what answers there is {f'the {service} service' if service else 'no blob service'}"
    elif deployment and found.headers.get(DEPLOYMENT_HEADER) != deployment:
        problem = "what answers there is the blob service of another deployment"
    elif found.status != 200:
        return [check_blobs(url, problem=f"HTTP {found.status}")]
    failed = last_failure(found, within_s=LATELY_S) if problem is None else None
    return [
        check_blobs(url, problem=problem, stranger=problem is not None),
        *([checks_work.check_blob_failure(failed)] if failed else ()),
    ]


def _addresses(settings: Settings) -> Iterator[tuple[str, str]]:
    for name, provider in sorted(settings.providers.items()):
        yield name, provider.base_url or registry.get(provider.api).default_base_url


async def _reach(name: str, url: str) -> Finding:
    """Check that the address answers at all. Sends no key. Uses a proxy from the environment, as fetchers do."""
    import httpx

    problem = None
    try:
        async with httpx.AsyncClient(timeout=REACH_S) as client:
            await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        problem = str(e) or type(e).__name__
    return checks_work.check_reach(name, url, problem=problem)


def examine_disk(directory: Path) -> Iterator[Finding]:
    if directory.is_dir():
        free = shutil.disk_usage(directory).free
        yield from check_disk(str(directory.resolve()), free_bytes=free)


# The checks of `tokenbus doctor` around the bus: the blob store, this disk. Pure.

LITTLE_ROOM = 2**30
"""Free bytes below which the disk may soon be too full for the server's files and blobs."""


def check_blobs(url: str, *, problem: str | None, stranger: bool = False) -> Finding:
    """``problem``: why the blob service did not answer; None if it did. ``stranger``: something else answered."""
    if problem is None:
        return Finding(level="ok", about="blobs", says=f"answers at {url}")
    todo = "start it with `tokenbus worker blobs`, or set blobs.service_url"
    if stranger:
        todo = "set http.blobs to a free port, or 0 under `tokenbus up`; or set blobs.service_url"
    return Finding(level="wrong", about="blobs", says=f"{url}: {problem}", todo=todo)


def check_disk(path: str, *, free_bytes: int) -> Iterator[Finding]:
    """Check the data directory's disk, which holds the blob store and the server of `tokenbus up`."""
    if free_bytes < LITTLE_ROOM:
        yield Finding(
            level="wrong",
            about="disk",
            says=f"{size(free_bytes)} are free where {path} lies",
            todo="make room, or set data_dir to another disk",
        )


# `tokenbus doctor --keys`: asks each provider for its list of models, which needs a valid key and costs nothing.

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

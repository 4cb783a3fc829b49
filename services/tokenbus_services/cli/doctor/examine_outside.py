"""Gathers the facts around the bus: the blob service, the providers' addresses, the disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.blob_wire import DEPLOYMENT_HEADER
from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.blobs.client import loader_of
from tokenbus_services.cli.doctor import checks_failures, checks_outside, checks_providers
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.http_probe import page
from tokenbus_services.cli.inspect.blob_facts import last_failure
from tokenbus_services.settings import BlobSettings, Settings

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
        return [checks_outside.check_blobs(url, problem=str(e) or type(e).__name__)]
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
        return [checks_outside.check_blobs(url, problem=f"HTTP {found.status}")]
    failed = last_failure(found, within_s=LATELY_S) if problem is None else None
    return [
        checks_outside.check_blobs(url, problem=problem, stranger=problem is not None),
        *([checks_failures.check_blob_failure(failed)] if failed else ()),
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
    return checks_providers.check_reach(name, url, problem=problem)


def examine_disk(directory: Path) -> Iterator[Finding]:
    if directory.is_dir():
        free = shutil.disk_usage(directory).free
        yield from checks_outside.check_disk(str(directory.resolve()), free_bytes=free)

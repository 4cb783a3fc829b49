"""`tokenbus up`: runs a server and all services on this machine until it is stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from ipaddress import ip_address
from pathlib import Path
from uuid import uuid4

import msgspec

from tokenbus.blob_wire import DEPLOYMENT_ENV, URL_ENV
from tokenbus.bus.server.server import parse_url
from tokenbus.bus.server.url import URL_FILE_ENV
from tokenbus.errors import SettingsError
from tokenbus.secret_env import file_variables
from tokenbus_services import settings as configuration
from tokenbus_services.cli import local_deployment as running
from tokenbus_services.cli import mock
from tokenbus_services.cli.service_registry import CALLS_PROVIDERS, SERVICES, ServiceName, services_of
from tokenbus_services.cli.signals import stop_on_signal
from tokenbus_services.cli.up.start_output import UpWatcher, up_watcher
from tokenbus_services.cli.up.supervisor import Supervisor, UpServer, WorkerSlot
from tokenbus_services.process.embedded_server import HOST, free_port
from tokenbus_services.redaction.redactor import provider_key_variables, tool_variables
from tokenbus_services.settings import Settings

STOP_GRACE_S = 10.0
"""How long a worker may take to stop, in addition to its drain time."""


def run(
    *,
    scales: Sequence[str] = (),
    services: str | None = None,
    data: Path | None = None,
    mock_provider: bool = False,
    chained: bool = False,
) -> None:
    """Run until an orderly stop. Raises SettingsError, ServerUnavailable, ChildGone."""
    settings = configuration.load()
    if chained:
        settings = msgspec.structs.replace(settings, stages=msgspec.structs.replace(settings.stages, chained=True))
    if mock_provider:
        settings = mock.with_console(settings)
    needed = parse_services(services) or services_of(settings, mock=mock_provider)
    slots = with_console(slots_for(needed, parse_scales(scales)), settings)
    if settings.http.blobs == 0 and runs_blobs(slots, settings):
        settings, slots = with_blobs_port(settings, slots, free_port())
    if mock_provider:
        slots = with_mock_provider(slots, free_port())
    directory = data or Path(settings.data_dir)
    with running.claim(directory) as claim, up_watcher(slots, console=shows_console(settings)) as watcher:
        asyncio.run(_up(settings, directory.resolve(), slots, claim, watcher))


async def _up(
    settings: Settings, directory: Path, slots: Sequence[WorkerSlot], claim: running.DirectoryClaim, watcher: UpWatcher
) -> None:
    stop = stop_on_signal()
    async with AsyncExitStack() as stack:
        url = settings.redis_url
        if url is None:
            server = await stack.enter_async_context(UpServer(directory / "server", watcher))
            url = server.url
        blobs_url, deployment = (settings.blobs.address, uuid4().hex) if runs_blobs(slots, settings) else (None, "")
        mocked = any(slot.name == mock.NAME for slot in slots)
        claim.announce(url, mock=mocked, blobs_url=blobs_url, deployment=deployment)
        watcher.server(parse_url(url).safe)
        env = {**os.environ, "TOKENBUS_REDIS_URL": url, "TOKENBUS_DATA": str(directory)}
        env.pop(URL_FILE_ENV, None)
        if blobs_url:
            env |= {URL_ENV: blobs_url, DEPLOYMENT_ENV: deployment}
        slots = [msgspec.structs.replace(slot, withheld=withheld_from(slot.service, settings)) for slot in slots]
        supervisor = Supervisor(slots, env=env, watcher=watcher, grace_s=settings.stages.drain_s + STOP_GRACE_S)
        await supervisor.run(stop)


def parse_services(text: str | None) -> list[ServiceName]:
    """Parse the services of ``--services``; empty if it is None. Raises SettingsError."""
    names = [] if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if text is not None and not names:
        raise SettingsError("options", "--services", "names none")
    return [_service("--services", name) for name in names]


def parse_scales(texts: Sequence[str]) -> dict[ServiceName, int]:
    """Parse ``parser=2`` as a service and its number of workers. Raises SettingsError."""
    scales: dict[ServiceName, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not (number.isascii() and number.isdigit()):
            raise SettingsError("options", "--scale", f"{text!r} is not SERVICE=N")
        scales[_service("--scale", name)] = int(number)
    return scales


def slots_for(services: Sequence[ServiceName], scales: dict[ServiceName, int]) -> list[WorkerSlot]:
    """Return the workers to run. The first of a service gets the port in the settings, the others any free port."""
    slots: list[WorkerSlot] = []
    for service in SERVICES:
        count = scales.get(service, 1) if service in services else 0
        for i in range(count):
            name = service if count == 1 else f"{service}-{i + 1}"
            slots.append(WorkerSlot(name=name, service=service, arguments=("--port", "0") if i else ()))
    if not slots:
        raise SettingsError("options", "--services", "nothing is left to run")
    return slots


def shows_console(settings: Settings) -> bool:
    """Whether the gateway of `up` serves the console: as the settings say; without a word there, on loopback."""
    if settings.console is not None:
        return settings.console.enabled
    return settings.gateway is not None and is_loopback(settings.http.host)


def with_console(slots: Sequence[WorkerSlot], settings: Settings) -> list[WorkerSlot]:
    """Return the workers, of which the gateways serve the console if they should."""
    if not shows_console(settings):
        return list(slots)
    return [
        msgspec.structs.replace(slot, arguments=(*slot.arguments, "--console")) if slot.service == "gateway" else slot
        for slot in slots
    ]


def is_loopback(host: str) -> bool:
    """Whether this address is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_mock_provider(slots: Sequence[WorkerSlot], port: int) -> list[WorkerSlot]:
    """Return the workers with the mock provider before them, on this port; it keeps the port across restarts."""
    url = f"http://{HOST}:{port}"
    with_mock_url = [msgspec.structs.replace(slot, arguments=(*slot.arguments, "--mock-url", url)) for slot in slots]
    return [WorkerSlot(name=mock.NAME, service=None, program=tuple(mock.command(port))), *with_mock_url]


def runs_blobs(slots: Sequence[WorkerSlot], settings: Settings) -> bool:
    """Whether the blob service of the deployment is one of these workers, rather than elsewhere."""
    return any(slot.service == "blobs" for slot in slots) and settings.blobs.loader is None


def with_blobs_port(settings: Settings, slots: Sequence[WorkerSlot], port: int) -> tuple[Settings, list[WorkerSlot]]:
    """Return both with this port for the first blob service, which keeps it across restarts, so that all find it."""
    given = [
        msgspec.structs.replace(slot, arguments=("--port", str(port)))
        if slot.service == "blobs" and not slot.arguments
        else slot
        for slot in slots
    ]
    url = settings.blobs.service_url or f"http://{HOST}:{port}"
    return msgspec.structs.replace(settings, blobs=msgspec.structs.replace(settings.blobs, service_url=url)), given


def withheld_from(service: ServiceName | None, settings: Settings) -> frozenset[str]:
    """Return the variables of provider keys and key files, withheld from every service that calls no provider.
    Tools get the variables that they name.
    """
    if service in CALLS_PROVIDERS:
        return frozenset()
    keys = provider_key_variables(settings)
    if service == "tools":
        keys -= tool_variables(settings)
    return keys | file_variables(keys)


def _service(option: str, name: str) -> ServiceName:
    if name not in SERVICES:
        raise SettingsError("options", option, f"{name!r} is not a service; the services are {', '.join(SERVICES)}")
    return name

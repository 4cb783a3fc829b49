"""`tokenbus up`: runs a server and all services on this machine until it is stopped."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

import msgspec

from tokenbus.blob_wire import DEPLOYMENT_ENV, URL_ENV
from tokenbus.bus.server.server import parse_url
from tokenbus.bus.server.url import URL_FILE_ENV
from tokenbus.client.local_up import FILE_NAME, Running, read
from tokenbus.errors import SettingsError
from tokenbus.secret_env import file_variables
from tokenbus_services import settings as configuration
from tokenbus_services.cli import mock
from tokenbus_services.cli.render import output
from tokenbus_services.cli.service_registry import CALLS_PROVIDERS, SERVICES, ServiceName, services_of
from tokenbus_services.cli.signals import stop_on_signal
from tokenbus_services.cli.up import supervisor as own_server
from tokenbus_services.cli.up.supervisor import Supervisor, UpServer, Watcher, WorkerSlot
from tokenbus_services.process.embedded_server import HOST, free_port
from tokenbus_services.redaction.known_secrets import provider_key_variables, tool_variables
from tokenbus_services.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

STOP_GRACE_S = 10.0
"""How long a worker may take to stop, in addition to its drain time."""


STOPPING = "stopping when what streams has ended; Ctrl-C again: at once"


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
    check_ports(slots, settings)
    with claim(directory) as claimed, up_watcher(slots, console=shows_console(settings)) as watcher:
        asyncio.run(_up(settings, directory.resolve(), slots, claimed, watcher))


async def _up(
    settings: Settings, directory: Path, slots: Sequence[WorkerSlot], claim: DirectoryClaim, watcher: UpWatcher
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


def check_ports(slots: Sequence[WorkerSlot], settings: Settings) -> None:
    """Raise SettingsError, once and before anything starts, if other processes have ports of these services."""
    host, taken = settings.http.host, list[str]()
    for slot in slots:
        if slot.service and "--port" not in slot.arguments:
            port: int = getattr(settings.http, slot.service)
            try:
                socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
            except OSError as e:  # any other error is the worker's to report
                taken += [f"{port} ({slot.service})"] if e.errno == errno.EADDRINUSE else []
    if taken:
        todo = "another `tokenbus up` may be running on this machine: stop it, or set other ports (0: any free one)"
        raise SettingsError("settings", "http", f"in use on {host}: {', '.join(taken)}; {todo}")


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


# The lock and the file are those of `tokenbus.client.local_up`, with which clients find it.


_WAIT_S = 0.5
_POLL_S = 0.02


class DirectoryClaim:
    """A data directory claimed by this process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def announce(
        self, redis_url: str | None, *, mock: bool = False, blobs_url: str | None = None, deployment: str = ""
    ) -> None:
        """Publish where the server and the blob service are, and whether the mock provider runs."""
        running = Running(pid=os.getpid(), redis_url=redis_url, mock=mock, blobs_url=blobs_url, deployment=deployment)
        data = msgspec.json.encode(running)
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


@contextmanager
def claim(directory: Path) -> Generator[DirectoryClaim]:
    """Claim the directory, creating it if necessary. Raises SettingsError if another `tokenbus up` has claimed it."""
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise SettingsError("settings", "data_dir", f"{directory}: {e.strerror}") from None
    try:
        # `running_in` holds the lock for an instant when it looks.
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    other = read(file)
                    who = f"process {other.pid}" if other else "another process"
                    problem = f"{who} runs `tokenbus up` in {directory.resolve()}: stop it, or choose another --data"
                    raise SettingsError("settings", "data_dir", problem) from None
                time.sleep(_POLL_S)
        claimed = DirectoryClaim(file)
        claimed.announce(None)
        yield claimed
    finally:
        os.close(file)


class UpWatcher(Watcher, Protocol):
    """Receives the events of `tokenbus up`, besides those of its services."""

    def server(self, url: str) -> None: ...


@contextmanager
def up_watcher(slots: Sequence[WorkerSlot], *, console: bool) -> Generator[UpWatcher]:
    """Return the watcher that suits stdout. ``console``: print the address of the gateway's console."""
    gateways = [slot.name for slot in slots if slot.service == "gateway"] if console else []
    screen = output.console()
    if screen is None:
        yield PlainWatcher(gateways)
    else:
        names = [slot.name for slot in slots]
        with StartTable(screen, [own_server.NAME, *names], gateways=gateways) as watcher:
            yield watcher


class PlainWatcher:
    """Plain lines: events on stdout, service logs on stderr."""

    def __init__(self, gateways: Sequence[str] = ()) -> None:
        """``gateways``: names of the services that serve the console."""
        self._gateways = gateways

    def server(self, url: str) -> None:
        print("server", url, flush=True)

    def ready(self, name: str, url: str) -> None:
        print("ready", name, url, flush=True)
        if name in self._gateways:
            print("console", console_url(url), flush=True)

    def all_ready(self) -> None:
        print("ready", flush=True)

    def died(self, name: str, how: str, pause_s: float) -> None:
        print(f"died {name} {how}; starting again in {pause_s:g} s", flush=True)

    def stopping(self) -> None:
        print(STOPPING, flush=True)

    def on_line(self, name: str, line: str) -> None:
        print(f"{name} | {line}", file=sys.stderr, flush=True)


class StartTable:
    """A live table until all services are ready, then lines."""

    def __init__(
        self, console: Console, names: Sequence[str], *, transient: bool = False, gateways: Sequence[str] = ()
    ) -> None:
        """``transient``: remove the table when all services are ready. ``gateways``: names of the services that serve
        the console.
        """
        from rich.live import Live

        self.console = console
        self._gateways = gateways
        self._urls: dict[str, str | None] = dict.fromkeys(names)
        self._live = Live(console=console, refresh_per_second=12, transient=transient)
        self._url = ""

    def __enter__(self) -> StartTable:
        self._live.start()
        self._show()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._live.stop()

    def server(self, url: str) -> None:
        self._url = url
        self.ready(own_server.NAME, url)

    def ready(self, name: str, url: str) -> None:
        if self._live.is_started:
            self._urls[name] = url
            self._show()
        else:
            self.console.print(f"{name} is ready again: {url}", style="green")

    def all_ready(self) -> None:
        self.stop()
        self.console.print("ready", style="bold green", end="")
        self.console.print(f" · server {self._url} · Ctrl-C stops all")
        for name in self._gateways:
            self.console.print(f"console {console_url(self._urls[name] or '')}", style="bold")
        self.console.print("tokenbus send, tail and doctor find it in this directory", style="dim")

    def died(self, name: str, how: str, pause_s: float) -> None:
        self.console.print(f"{name} {how}; starting again in {pause_s:g} s", style="yellow")

    def stopping(self) -> None:
        self.stop()
        self.console.print(STOPPING, style="dim")

    def on_line(self, name: str, line: str) -> None:
        self.console.print(log_line(name, line))

    def _show(self) -> None:
        self._live.update(start_table(self._urls))


def console_url(gateway: str) -> str:
    return f"{gateway}/console/"


def start_table(urls: dict[str, str | None]) -> Table:
    """Render one row per process: a spinner, or its URL."""
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, url in urls.items():
        sign = Spinner("dots", style="cyan") if url is None else Text("✓", style="green")
        table.add_row(sign, name, Text(url or "starting", style="dim"))
    return table


def log_line(name: str, line: str) -> Text:
    """Render a line of a service's log for a person: the event, then its fields."""
    from rich.text import Text

    shown = Text(f"{name} │ ", style="cyan")
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return shown.append(output.safe(line), style="default")
    level = str(fields.pop("level", "info"))
    event = str(fields.pop("event", ""))
    style = {"warning": "yellow", "error": "red", "critical": "bold red"}.get(level, "default")
    for known in ("timestamp", "service"):
        fields.pop(known, None)
    hint = fields.pop("hint", None)
    shown.append(output.safe(event), style=style)
    for key, value in fields.items():
        shown.append(output.safe(f" {key}={value}"), style="dim")
    if hint:
        shown.append(output.safe(f": {hint}"), style=style)  # what a newcomer looks for
    return shown

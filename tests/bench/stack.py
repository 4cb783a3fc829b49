"""The measured system: one server, a process for each service, the mock provider, and the bare chain beside them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import redis

from tests.bench import subscriber
from tests.bench.jobs import CHAIN, Desk, Load
from tests.bench.procs import Processes, answers, listens
from tests.servers import binary
from tokenbus.bus.keys import Keys
from tokenbus_services.mock_provider import STAMP, Delivery, Reply, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer, free_port

SERVICES = ("fetcher", "normalizer", "parser")
PIPELINE = "pipeline"
"""The service that stands for all three."""
PROVIDER = "anthropic"
RUNS_AT_ONCE = 1000
"""The number of runs that one fetcher accepts; more than the default, for the table of many runs."""


class Stack(msgspec.Struct, frozen=True):
    """All processes, ready for measurements."""

    client: Any
    """A plain connection to the server."""
    desk: Desk
    keys: Keys
    server: str
    """Its name and version."""
    pids: dict[str, int]
    """Process ids by name: the services, `server`, `provider`, `subscriber`, and those of the bare chain."""
    urls: dict[str, str]
    """The ports of the services and the provider."""


def service_of(process: str) -> str:
    """The service that a process runs: the second fetcher is called `fetcher 2`."""
    return process.partition(" ")[0]


@contextmanager
def running(
    loads: Sequence[Load],
    *,
    workers: int = 1,
    scripts: Mapping[str, Script] | None = None,
    settings: str = "",
    services: Sequence[str] = SERVICES,
    runs_at_once: int = RUNS_AT_ONCE,
    providers: int = 1,
) -> Generator[Stack]:
    """Start everything, with this many workers of each service; stop everything at the end.

    The provider has a script for each load, and those given by name. ``settings`` are further tables of
    `tokenbus.toml`. ``runs_at_once``: how many runs one fetcher accepts. ``providers``: processes of the mock provider;
    the second is the provider `anthropic-2`.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="tokenbus-bench-")))
        server = stack.enter_context(EmbeddedServer(directory / "server", binary=binary()))
        client = stack.enter_context(closing(redis.Redis(port=server.port, protocol=2, socket_timeout=None)))
        processes = stack.enter_context(Processes(directory))
        desk = Desk(client, processes.check)
        answers = {load.name: _says(load) for load in loads} | dict(scripts or {})
        provider_urls = _start_providers(processes, directory, answers, providers)
        urls = _start_services(
            processes, _settings(directory, server.url, provider_urls, settings, runs_at_once), services, workers
        )
        processes.start(subscriber.NAME, "tests.bench.subscriber", server.url)
        for name in CHAIN:
            processes.start(name, "tests.bench.bare", server.url, name)
        for name in (subscriber.NAME, *CHAIN):
            desk.answer(name, bool, timeout_s=60)
        pids = {**processes.pids, "server": server.pid}
        yield Stack(client, desk, Keys(), _version(client), pids, {**urls, "provider": provider_urls[0]})


def _says(load: Load) -> Script:
    # Every chunk is one word; the word is the time at which the read that contains it was written.
    turn = Turn(says=Reply(text=" ".join([STAMP] * load.chunks)), delivery=Delivery(pace=load.pace or None))
    return Script(turns=(turn,))


def _start_providers(processes: Processes, directory: Path, scripts: Mapping[str, Script], providers: int) -> list[str]:
    folder = directory / "scripts"
    folder.mkdir()
    for name, script in scripts.items():
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(script))
    ports = [free_port() for _ in range(providers)]
    for number, port in enumerate(ports, 1):
        name = _numbered("provider", number, " ")
        processes.start(name, "tokenbus_services.mock_provider", "--scripts", str(folder), "--port", str(port))
    for port in ports:
        processes.until(lambda port=port: listens(port), "the mock provider")
    return [f"http://127.0.0.1:{port}" for port in ports]


def _numbered(name: str, number: int, between: str) -> str:
    return name if number == 1 else f"{name}{between}{number}"


def _settings(directory: Path, redis_url: str, provider_urls: Sequence[str], further: str, runs_at_once: int) -> Path:
    path = directory / "tokenbus.toml"
    tables = "".join(
        f"""
[providers.{_numbered(PROVIDER, number, "-")}]
api = "{PROVIDER}"
base_url = "{url}"
api_key_env = ""
"""
        for number, url in enumerate(provider_urls, 1)
    )
    path.write_text(
        f"""
redis_url = "{redis_url}"
data_dir = "{directory}"
log_level = "warning"
{tables}
[limits]
runs_per_fetcher = {runs_at_once}
{further}
"""
    )
    return path


def _start_services(processes: Processes, config: Path, services: Sequence[str], workers: int) -> dict[str, str]:
    names = [_numbered(name, n, " ") for name in services for n in range(1, workers + 1)]
    ports = {name: free_port() for name in names}
    for name, port in ports.items():
        arguments = ("worker", service_of(name), "--port", str(port))
        processes.start(name, "tokenbus_services.cli", *arguments, env={"TOKENBUS_CONFIG": str(config)})
    for name, port in ports.items():
        processes.until(lambda port=port: answers(f"http://127.0.0.1:{port}/ready"), f"the {name}")
    return {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


def _version(client: Any) -> str:
    info: dict[str, Any] = client.info("server")
    return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"

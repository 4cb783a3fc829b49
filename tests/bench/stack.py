"""What is measured: one server, a process for each service, the replay provider, and the bare chain beside them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
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
from tokenbus_services.embedded import EmbeddedServer, free_port
from tokenbus_services.replay import STAMP, Delivery, Reply, Script, Turn

SERVICES = ("fetcher", "normalizer", "parser")
PROVIDER = "anthropic"


class Stack(msgspec.Struct, frozen=True):
    """All that runs, ready to be measured."""

    client: Any
    """A plain connection to the server."""
    desk: Desk
    keys: Keys
    server: str
    """Its name and version."""
    pids: dict[str, int]
    """Process ids by name: the services, `server`, `provider`, `subscriber`, and those of the bare chain."""


@contextmanager
def running(loads: Sequence[Load]) -> Generator[Stack]:
    """Start everything, with a script at the provider for each load; in the end stop everything."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="tokenbus-bench-")))
        server = stack.enter_context(EmbeddedServer(directory / "server", binary=binary()))
        client = stack.enter_context(closing(redis.Redis(port=server.port, protocol=2, socket_timeout=None)))
        processes = stack.enter_context(Processes(directory))
        desk = Desk(client, processes.check)
        provider_url = _start_provider(processes, directory, loads)
        _start_services(processes, _settings(directory, server.url, provider_url))
        processes.start(subscriber.NAME, "tests.bench.subscriber", server.url)
        for name in CHAIN:
            processes.start(name, "tests.bench.bare", server.url, name)
        for name in (subscriber.NAME, *CHAIN):
            desk.answer(name, bool, timeout_s=60)
        yield Stack(client, desk, Keys(), _version(client), {**processes.pids, "server": server.pid})


def _start_provider(processes: Processes, directory: Path, loads: Sequence[Load]) -> str:
    scripts = directory / "scripts"
    scripts.mkdir()
    for load in loads:
        # Every chunk is one word, and every word the time at which the read that holds it was written.
        turn = Turn(says=Reply(text=" ".join([STAMP] * load.chunks)), delivery=Delivery(pace=load.pace or None))
        (scripts / f"{load.name}.json").write_bytes(msgspec.json.encode(Script(turns=(turn,))))
    port = free_port()
    processes.start("provider", "tokenbus_services.replay", "--scripts", str(scripts), "--port", str(port))
    processes.until(lambda: listens(port), "the replay provider")
    return f"http://127.0.0.1:{port}"


def _settings(directory: Path, redis_url: str, provider_url: str) -> Path:
    path = directory / "tokenbus.toml"
    path.write_text(
        f"""
redis_url = "{redis_url}"
data_dir = "{directory}"
log_level = "warning"

[providers.{PROVIDER}]
api = "{PROVIDER}"
base_url = "{provider_url}"
api_key_env = ""
"""
    )
    return path


def _start_services(processes: Processes, config: Path) -> None:
    ports = {name: free_port() for name in SERVICES}
    for name, port in ports.items():
        arguments = ("worker", name, "--port", str(port))
        processes.start(name, "tokenbus_services.cli", *arguments, env={"TOKENBUS_CONFIG": str(config)})
    for name, port in ports.items():
        processes.until(lambda port=port: answers(f"http://127.0.0.1:{port}/ready"), f"the {name}")


def _version(client: Any) -> str:
    info: dict[str, Any] = client.info("server")
    return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"

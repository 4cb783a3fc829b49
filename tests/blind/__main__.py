"""`python -m tests.blind --out DIRECTORY`: inject one fault, or none, chosen at random, and record every signal.

Read `signals.txt` first; `sealed.txt` names the fault. Needs Prometheus and, for the full disk, the right to mount a
tmpfs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from tests.blind.faults import FAULTS, World
from tests.blind.signals import Signals
from tests.collector import collector
from tests.deploy.prometheus_server import prometheus
from tests.e2e.conftest import sender
from tests.e2e.fleet import SEPARATE, Kind, fleet
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn
from tokenbus_services.process.embedded_server import free_port

KINDS: tuple[Kind, ...] = (*SEPARATE, "policy", "gateway")
DISK_MB = 160
PAUSE_S = 0.4
WATCH_S = 75.0
DOCTOR_AT = (12.0, 60.0)
METRICS_AT = (30.0, 70.0)
PLAIN = Script(name="plain", turns=(Turn(says=Reply(text="A word and another. " * 10)),))
LARGE = Script(name="large", turns=(Turn(says=Reply(text="Much to say. " * 100_000, chunk_size=2_000)),))


@contextmanager
def server_on_a_small_disk(directory: Path) -> Iterator[str]:
    """A server with an append-only file on a disk of its own; yields its url."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", directory], check=True)
    port = free_port()
    options = ["--port", str(port), "--dir", str(directory), "--appendonly", "yes", "--save", ""]
    process = subprocess.Popen([binary(), *options], stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        subprocess.run(["umount", directory], check=False)


async def plant(out: Path, directory: Path, faults: Sequence[str]) -> None:
    os.environ["MARKS"] = str(directory)
    keys = Keys("blind", 4)
    world: World | None = None
    with server_on_a_small_disk(directory / "disk") as url, collector() as received:
        server = Server(url)
        await eventually(lambda: answers(server))
        send = sender(server, keys)
        toml = f"""
[gateway]
[otel]
endpoint = "{received.url}"
[policies.guard]
use = "tests.blind.policies:Guard"
timeout_s = 5
"""

        def choose(request: object) -> Script | None:
            return world.answer if world else None

        async with (
            MockProvider([PLAIN, LARGE], choose=choose) as provider,
            fleet(directory, url, keys, provider.url, KINDS, toml) as services,
        ):
            world = World(services, keys, send, directory / "disk", directory)
            targets = [urlsplit(worker.url).netloc for worker in services.workers]
            async with prometheus(directory / "prometheus", targets, quick=False) as watching:
                loading = asyncio.create_task(load(world))
                await asyncio.sleep(15)  # a healthy time, for rates
                signals = Signals(services, watching, received, out / "signals.txt")
                signals.begin()
                name = secrets.choice(faults)
                (out / "sealed.txt").write_text(f"{name:20}")  # the size of the file reveals nothing
                await FAULTS[name](world)
                await watch(signals)
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                counted = [f"{count:5} x  {what}" for what, count in signals.counts.most_common()]
                (out / "counts.txt").write_text("\n".join(counted) + "\n")
            (directory / "disk" / "filler").unlink(missing_ok=True)
            (directory / "hang").unlink(missing_ok=True)
            for worker in services.workers:
                worker.ends_with = (0, -9, 7)
        await server.aclose()


async def answers(server: Server) -> bool:
    try:
        return bool(await server.client.ping())
    except (RedisError, OSError) as e:
        raise AssertionError(str(e)) from e


async def load(world: World) -> None:
    """Publish a run now and then, every second one under a policy. The server may refuse them."""
    n = 0
    while True:
        n += 1
        policies = {"policies": ["guard"]} if n % 2 else {}
        with suppress(RedisError, OSError):
            await world.send("plain", f"number {n}", provider="openai-chat" if n % 3 else "anthropic", **policies)
        await asyncio.sleep(PAUSE_S)


async def watch(signals: Signals) -> None:
    """Read the signals once a second; the doctor and the metrics at their times."""
    clock = asyncio.get_running_loop().time
    begin, doctors, metrics = clock(), list(DOCTOR_AT), list(METRICS_AT)
    request_tasks: list[asyncio.Task[None]] = []
    while (since := clock() - begin) < WATCH_S:
        await signals.look()
        if doctors and since >= doctors[0]:
            doctors.pop(0)
            request_tasks.append(asyncio.create_task(signals.doctor()))
        if metrics and since >= metrics[0]:
            metrics.pop(0)
            await signals.metrics()
        await asyncio.sleep(1)
    for task in request_tasks:
        task.cancel()  # a doctor that takes this long is no help
    await asyncio.gather(*request_tasks, return_exceptions=True)


def main() -> None:
    """Inject one fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.blind")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--without", action="append", default=[], choices=list(FAULTS), help="not this one; may be repeated"
    )
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="tokenbus-blind-") as directory:
        asyncio.run(plant(out, Path(directory), [name for name in FAULTS if name not in options.without]))


if __name__ == "__main__":
    main()

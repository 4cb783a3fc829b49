"""What 300 followers cost each client: connections and memory; and how long a test with the shared fixture takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from tests.bench.figures import Figure
from tests.clients import node
from tokenbus.testing import LocalBus, Reply, Stall, Turn

FOLLOWERS = 300
TESTS = 20
STALLED = Turn(says=Reply(text="Once upon a time"), fault=Stall(after_text="upon"))

# Each follows the runs that it is told, waits for their next events, and prints by how many KB it has grown.
_RSS = "int(open('/proc/self/statm').read().split()[1]) * 4"
PYTHON = f"""
import asyncio, os, sys
from tokenbus import Client

async def main():
    async with Client() as bus:
        await bus.result(sys.argv[1])
        before = {_RSS}
        feeds = [bus.follow(run) for run in sys.argv[2:]]
        await asyncio.gather(*(anext(feed) for feed in feeds))
        async def rest(feed):
            async for _ in feed: pass
        tasks = [asyncio.create_task(rest(feed)) for feed in feeds]
        await asyncio.sleep(1)
        print({_RSS} - before, flush=True)
        sys.stdin.read()
        os._exit(0)

asyncio.run(main())
"""
SYNC = f"""
import os, sys, threading, time
from tokenbus.sync import Client

bus = Client().open()
bus.result(sys.argv[1])
before = {_RSS}
def rest(run):
    for _ in bus.follow(run): pass
for run in sys.argv[2:]:
    threading.Thread(target=rest, args=(run,), daemon=True).start()
time.sleep(3)
print({_RSS} - before, flush=True)
sys.stdin.read()
os._exit(0)
"""
NODE = """
import { Client } from "./dist/src/index.js";
const [done, ...runs] = process.argv.slice(2);
const bus = new Client();
await bus.result(done);
const before = process.memoryUsage.rss();
for (const run of runs) (async () => { for await (const _ of bus.follow(run)); })().catch(() => {});
await new Promise((resolve) => setTimeout(resolve, 3000));
console.log(Math.round((process.memoryUsage.rss() - before) / 1024));
process.stdin.resume().on("end", () => process.exit());
"""


def measured_hands() -> list[Figure]:
    """Followers of each client on one bus, then tests one after the other on the same bus."""
    with tempfile.TemporaryDirectory() as place, LocalBus() as bus:
        project = node.project(Path(place))
        compiled = node.run("node_modules/typescript/bin/tsc", cwd=project)
        assert compiled.returncode == 0, compiled.stdout
        (project / "followers.mjs").write_text(NODE)
        clients = {
            "Python": [sys.executable, "-c", PYTHON],
            "tokenbus.sync": [sys.executable, "-c", SYNC],
            "Node": [str(node.NODE), "followers.mjs"],
        }
        figures = [figure for name, command in clients.items() for figure in _followed(bus, name, command, project)]
        return [*figures, _fixture(bus)]


def _followed(bus: LocalBus, name: str, command: list[str], cwd: Path) -> list[Figure]:
    bus.reset()
    bus.model_says("greeter", "Hello.")
    bus.model_says("stalled", STALLED)
    with bus.sync_client() as client:
        done = client.publish(bus.request("greeter"))
        done.result()
        runs = [client.publish(bus.request("stalled")).id for _ in range(FOLLOWERS)]
    with closing(_server(bus)) as server:
        before = len(server.client_list())
        env = {**os.environ, **bus.environment}
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, done.id, *runs], cwd=cwd, env=env, stdin=pipe, stdout=pipe) as process:
            assert process.stdout
            grown = json.loads(process.stdout.readline())
            connections = len(server.client_list()) - before
    return [
        Figure(name=f"connections of {FOLLOWERS} followers, {name}", unit="", value=connections),
        Figure(name=f"memory of a follower, {name}", unit="KB", value=grown / FOLLOWERS),
    ]


def _server(bus: LocalBus) -> Any:
    return Redis.from_url(bus.url)  # pyright: ignore[reportUnknownMemberType]


def _fixture(bus: LocalBus) -> Figure:
    """A test that publishes and takes a result, with the fixture's reset after it."""
    bus.reset()
    seconds: list[float] = []
    for _ in range(TESTS):
        began = time.monotonic()
        bus.model_says("greeter", "Hello.")
        with bus.sync_client() as client:
            client.publish(bus.request("greeter")).result()
        bus.reset()
        seconds.append(time.monotonic() - began)
    return Figure(name="a test with the shared fixture", unit="s", value=median(seconds))

"""How long the server runs each script at its largest arguments and state.

The server runs no other command meanwhile, so this bounds how long one user of a server delays all others. Two clocks
measure each call, and the lesser counts: the script's own time, and the processor time of the server's thread. The
second has no time in which the server waited for a processor, but also reads the arguments.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import redis

from tests.bench.figures import Figure
from tests.contract.bus.scripts.largest import LARGEST, largest_call
from tests.contract.bus.scripts.scenes import SCENES, World
from tests.servers import binary
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.process.embedded_server import EmbeddedServer

MOST_MS = 20.0
ROUNDS = 5
"""Each script counts with its fastest time: slower ones were disturbed."""


def longest_scripts() -> list[Figure]:
    """Measure every script, the longest first."""
    names = sorted({*SCENES, *LARGEST})
    ms: dict[str, list[float]] = {name: [] for name in names}
    with EmbeddedServer(binary=binary()) as server:
        for n in range(ROUNDS * len(names)):
            ms[name := names[n % len(names)]].append(asyncio.run(_measured(server.port, name)))
    fastest = sorted(((min(each), name) for name, each in ms.items()), reverse=True)
    return [
        Figure(name=f"script {name}", unit="ms", value=value, aim=f"≤ {MOST_MS:g}", met=value <= MOST_MS)
        for value, name in fastest
    ]


async def _measured(port: int, name: str) -> float:
    """Milliseconds that the server was in the script."""
    with closing(redis.Redis(port=port, protocol=2)) as client:
        client.flushall()
        async with Server(f"redis://127.0.0.1:{port}") as server:
            world = World(server, Keys("bench", 4))
            await world.build()
            call = await largest_call(name, world)
            client.script_load(call.script.text)
            client.config_resetstat()
            before_s = _used_s(client)
            await run_script(server, call)
            used_s = _used_s(client) - before_s
        stats: dict[str, Any] = client.info("commandstats")
        return min(stats["cmdstat_evalsha"]["usec"] / 1000, used_s * 1000)


def _used_s(client: redis.Redis) -> float:
    """Processor seconds of the thread that runs all commands."""
    used: dict[str, Any] = client.info("cpu")
    return used["used_cpu_sys_main_thread"] + used["used_cpu_user_main_thread"]

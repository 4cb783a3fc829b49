"""A worker works or goes: whichever of its long-lived tasks ends or stalls, it hands over and ends by itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import WEATHER, Send, sender
from tests.e2e.faults.faulty_worker import BLOCKED_S, FaultyWorker
from tests.e2e.fleet import SEPARATE, WITH_TOOLS, Fleet, Kind, ended, fleet
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import TOKEN, TOOL_RESULT, Delivery, MockProvider, Reply, Script, ToolCall, Turn
from tokenbus_services.runtime.supervision import EXIT_STUCK

KINDS: tuple[Kind, ...] = (*WITH_TOOLS, "policy", "recorder")
_TASKS: dict[Kind, set[str]] = {
    "fetcher": {
        *(f"{task} {group}" for task in ("queue", "heartbeat", "sign-on") for group in ("intake", "fetcher")),
        *("raw writer", "admission", "limits", "control", "silent calls", "deployment"),
        *("subscriber intake", "subscriber fetcher"),
    },
    "normalizer": {"leases normalizer", "deployment", "subscriber normalizer"},
    "parser": {"leases parser", "activity", "clock", "room", "durable ends", "deployment", "subscriber parser"},
    "tools": {
        *("queue tools", "heartbeat tools", "sign-on tools"),
        *("control", "executors", "deployment", "subscriber tools"),
    },
    "policy": {"leases policy", "partitions", "executors", "deployment", "subscriber policy"},
    "recorder": {
        *("queue recorder", "heartbeat recorder", "sign-on recorder"),
        *("leases of records", "deployment", "subscriber recorder"),
    },
    "blobs": {"blob sweep"},
}
_TASKS["pipeline"] = set().union(*(_TASKS[kind] for kind in SEPARATE))
TASKS: dict[Kind, set[str]] = {kind: _TASKS[kind] for kind in (*KINDS, "blobs")}
"""Everything that each worker of this fleet lives by."""
PASSING = re.compile(r"\w+ \d+$")
"""Tasks that come and go with a partition."""
OWNERS: tuple[Kind, ...] = ("normalizer", "parser", "policy")
"""They work on partitions that they own. So do pipelines, but a round has more of them than there are partitions."""
FAULTS: list[tuple[str, Kind, str]] = [
    *(("freeze", kind, task) for kind in TASKS for task in sorted(TASKS[kind])),
    *(("end", kind, min(TASKS[kind])) for kind in TASKS),
]
"""Each task freezes, because each beats in its own way. That a task ended is seen in one way, of each that is listed as
one that may not (`tests/unit/bus/test_liveness.py`), so one of each kind does.
"""
ROUNDS = 3
"""Number of rounds for the faults. In each round some workers of every kind fail and others work."""
OPEN = 6
"""Runs that are under way at any time."""
ENDED_S = 60.0
"""By then every run that was open at the fault has ended: the aim is 10 s on a machine with nothing else to do."""
SCRIPT = Script(
    name="story",
    turns=(
        Turn(
            says=Reply(
                text=f"Let me look, {TOKEN}.", tool_calls=(ToolCall(name="weather", arguments={"city": TOKEN}),)
            ),
            delivery=Delivery(pace=20),
        ),
        Turn(says=Reply(text=f"For {TOKEN} it says {TOOL_RESULT}. " + "word " * 20), delivery=Delivery(pace=20)),
    ),
)
SETTINGS = """
[blobs]
service_url = "%s"

[records]
sample = 1.0

[policies.nothing]
use = "tests.e2e.policies.guards:NoTool"

[policies.nothing.options]
word = "never"
"""


class Load:
    """Keeps this many runs open until `finish`."""

    def __init__(self, server: Server, keys: Keys, send: Send) -> None:
        self._server, self._keys, self._send = server, keys, send
        self.open: set[str] = set()
        self.ended: list[dict[str, Any]] = []
        self._count = 0
        self._stopping = False
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(OPEN)]

    async def _keep_one(self) -> None:
        while not self._stopping:
            self._count += 1
            run = f"run-{self._count}"
            self.open.add(run)
            await self._send(
                "story", f"t{self._count}", id=run, tools=[WEATHER], policies=["nothing"], on_failure="restart"
            )
            logs = await ended(self._server.client, self._keys, [run], timeout=240)
            self.ended.append(logs[run][-1])
            self.open.discard(run)

    async def finish(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def loaded(server: Server, server_url: str, keys: Keys, directory: Path) -> AsyncGenerator[Load]:
    (directory / "store").mkdir()
    async with (
        MockProvider([SCRIPT]) as provider,
        fleet(directory / "store", server_url, keys, provider.url, ["blobs"]) as stores,
        fleet(directory, server_url, keys, provider.url, KINDS, SETTINGS % stores.workers[0].url),
    ):
        load = Load(server, keys, sender(server, keys))
        yield load
        await load.finish()
        for end in load.ended:
            assert end["type"] == "completed", end
        await recorded(server, keys)


async def recorded(server: Server, keys: Keys) -> None:
    """Wait until no record is pending: a recorder that stops hands back what it has just read."""

    async def none_pending() -> bool:
        topics = [keys.topic(p, "records") for p in range(keys.partitions)]
        groups = [group for topic in topics for group in await server.client.xinfo_groups(topic)]
        return not any(group["pending"] or group["lag"] for group in groups)

    await eventually(none_pending, timeout=ENDED_S)


@asynccontextmanager
async def faulty(directory: Path, name: str, kinds: Sequence[Kind], **env: str) -> AsyncGenerator[list[FaultyWorker]]:
    """Workers of these kinds to which something can happen."""
    workers = [FaultyWorker(kind, directory, f"{name}-{n}-{kind}", env) for n, kind in enumerate(kinds)]
    try:
        await asyncio.gather(*(worker.ready() for worker in workers))
        yield workers
    finally:
        for worker in workers:
            await worker.kill()


async def own_partitions(server: Server, keys: Keys, workers: Sequence[FaultyWorker]) -> None:
    """Wait until each that works on partitions has one at least."""
    wanted = {worker.pid for worker in workers if worker.kind in OWNERS}

    async def all_own() -> bool:
        leases = [keys.lease(p, kind) for p in range(keys.partitions) for kind in OWNERS]
        owners = [await server.client.hget(lease, "owner") for lease in leases]
        return wanted <= {int(owner.split(b"-")[-2]) for owner in owners if owner}

    await eventually(all_own, timeout=ENDED_S)


@pytest.mark.leaves_pending  # a consumer that ended as it was keeps its name until a later worker sweeps it away
@pytest.mark.timeout(600)
async def test_another_worker_ends_a_workers_runs_if_any_of_its_tasks_ends_or_stalls(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with loaded(server, server_url, keys, tmp_path) as load:
        for n in range(ROUNDS):
            now = FAULTS[n::ROUNDS]
            async with faulty(tmp_path, f"{n}", [kind for _, kind, _ in now]) as workers:
                for worker in workers:
                    names = {name for name in await worker.names() if not PASSING.match(name)}
                    assert names == TASKS[worker.kind], worker.kind
                await own_partitions(server, keys, workers)
                open_then, began = set(load.open), time.monotonic()
                for worker, (fault, _, task) in zip(workers, now, strict=True):
                    worker.inject(f"{fault} {task}")
                await eventually(lambda then=open_then: not then & load.open, timeout=ENDED_S)
                runs_s = time.monotonic() - began
                for worker, (fault, kind, task) in zip(workers, now, strict=True):
                    assert await worker.ended(timeout=ENDED_S) == EXIT_STUCK, (fault, kind, task, worker.log[-4000:])
                    [exit_line] = [line for line in worker.log.splitlines() if '"worker_exiting"' in line]
                    assert f'"{task}"' in exit_line, (fault, kind, task, exit_line)
                print(f"runs ended after {runs_s:.1f} s, workers after {time.monotonic() - began:.1f} s")


GATEWAY_TASKS = {
    *("heartbeat", "deployment", "count of spend", "leases runs:gateway-spend", "places of open answers"),
    *("admin API", "tail of logs", "conversations whose run has ended"),
}
"""Everything that a gateway with keys and an open answer lives by."""
GATEWAY_FAULTS = (
    *(("freeze", task) for task in sorted(GATEWAY_TASKS - {"heartbeat", "deployment"})),
    *(("end", task) for task in ("count of spend", "places of open answers", "tail of logs")),
)
KEY = new_key()
GATEWAY = f"""
[gateway]
early_status_s = 0.01
[gateway.admin]
port = 0
[gateway.keys.someone]
sha256 = "{KEY.sha256}"
max_parallel_requests = 1000
"""


@pytest.mark.leaves_pending
async def test_a_gateway_exits_if_any_of_its_tasks_ends_or_stalls(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_GATEWAY_ADMIN_TOKEN", "a-token-of-the-test")
    Fleet(tmp_path, server_url, keys, "http://127.0.0.1:1", GATEWAY)  # writes the settings
    messages: Any = {"model": "anthropic/any", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with (
        AsyncExitStack() as answers,
        httpx.AsyncClient(headers={"authorization": f"Bearer {KEY.text}"}, timeout=ENDED_S) as http,
        faulty(tmp_path, "access", [*repeat("gateway", len(GATEWAY_FAULTS))]) as gateways,
    ):
        for gateway in gateways:  # no intake accepts its run, so the answer stays open and waits for the log
            url = gateway.log.partition("ready gateway ")[2].split()[0]
            answer = await answers.enter_async_context(http.stream("POST", f"{url}/v1/chat/completions", json=messages))
            assert answer.status_code == 200

            async def tasks(gateway: FaultyWorker = gateway) -> set[str]:
                return {name for name in await gateway.names() if not PASSING.match(name)}

            await eventually(lambda tasks=tasks: _are(tasks, GATEWAY_TASKS))
        for gateway, (fault, task) in zip(gateways, GATEWAY_FAULTS, strict=True):
            gateway.inject(f"{fault} {task}")
        for gateway, (fault, task) in zip(gateways, GATEWAY_FAULTS, strict=True):
            assert await gateway.ended(timeout=ENDED_S) == EXIT_STUCK, (fault, task, gateway.log[-4000:])
            [exit_line] = [line for line in gateway.log.splitlines() if '"worker_exiting"' in line]
            assert f'"{task}"' in exit_line, (fault, task, exit_line)


async def _are(tasks: Callable[[], Awaitable[set[str]]], wanted: set[str]) -> bool:
    return await tasks() == wanted


@pytest.mark.leaves_pending
async def test_a_worker_whose_event_loop_is_blocked_ends_also_if_the_interpreters_lock_is_held(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    kinds: dict[Kind, str] = {"fetcher": "block", "parser": "burn", "tools": "hold"}
    async with (
        loaded(server, server_url, keys, tmp_path),
        faulty(tmp_path, "blocked", [*kinds], **{BLOCKED_S: "3"}) as workers,
    ):
        for worker in workers:
            worker.inject(kinds[worker.kind])
        for worker in workers:
            assert await worker.ended(timeout=ENDED_S) == EXIT_STUCK, worker.log[-4000:]
            assert "event_loop_blocked" in worker.log
            assert "in on_signal" in worker.log, "the log has the stack"


async def test_a_worker_that_was_stopped_for_longer_than_its_event_loop_may_stand_still_continues(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    bound_s = 2.0
    async with (
        loaded(server, server_url, keys, tmp_path),
        faulty(tmp_path, "stopped", ["parser"], **{BLOCKED_S: str(bound_s)}) as [worker],
    ):
        os.kill(worker.pid, signal.SIGSTOP)
        until = time.monotonic() + 3 * bound_s
        await eventually(lambda: time.monotonic() > until)
        os.kill(worker.pid, signal.SIGCONT)
        assert await worker.names(), "it still works"
        assert "event_loop_blocked" not in worker.log

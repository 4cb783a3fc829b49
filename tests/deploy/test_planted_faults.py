"""Ten faults planted in one deployment under load, in random order, and read from its alerts alone.

A real Prometheus has the shipped rules, with a twelfth of their times. The reader has what fires, and a page.

`pytest -s` prints when each alert fired. `TOKENBUS_FAULTS="full server,dead receiver"` plants these alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from redis.exceptions import RedisError

from tests.deploy.prometheus_server import Prometheus, needs_prometheus, prometheus
from tests.e2e.conftest import WEATHER, sender
from tests.e2e.faults.test_clocks import SHIFT
from tests.e2e.fleet import Fleet, Kind, Worker, only_separate
from tests.e2e.gateway.served import auth
from tests.servers import binary
from tests.services.webhooks.test_receiver import OLD, Receiver, served
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import (
    Delivery,
    MockProvider,
    ModelRequest,
    Picture,
    Reply,
    Script,
    Status,
    ToolCall,
    Turn,
)
from tokenbus_services.mock_provider.script import Fault as Answer
from tokenbus_services.process.embedded_server import EmbeddedServer, free_port

FASTER = 12
"""Rules wait and look back this many times less. Prometheus looks each second."""
KINDS: tuple[Kind, ...] = (
    *("fetcher", "normalizer", "parser", "tools", "recorder", "webhooks", "gateway"),
    *("fetcher", "parser"),
)
PAUSE_S = 0.4
"""Between two rounds of requests of the load."""
LOOKS = 10
"""Of the alerts, a second apart, after the right one fires: so long may a false one take."""
PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==")
SPENDER, METRICS = new_key(), new_key()
OF_THE_MACHINE = {"TokenbusSlowCommits", "TokenbusStageLags"}
"""True on a machine that is busy with other tests."""
FAULTS_PAGE = Path("docs/operate/faults.md")


class Refusing(Receiver):
    """A receiver that can be out of order."""

    refusing = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.refusing:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await super().__call__(scope, receive, send)


class Town:
    """The deployment, its load, and what can be done to it."""

    def __init__(self, directory: Path, keys: Keys, process: EmbeddedServer, server: Server, receiver: Refusing):
        self.directory = directory
        self.keys = keys
        self.process = process
        self.server = server
        self.receiver = receiver
        self.delay_s = 0.0
        """Before each answer of the provider."""
        self.answers: Answer | None = None
        """What it answers in place of the model."""
        self.fleet: Fleet
        self.store: Fleet
        self.store_port = free_port()
        self.spending = False
        self.watching: Prometheus

    def script_for(self, request: ModelRequest) -> Script:
        delivery = Delivery(delay_s=self.delay_s)
        first = (self.answers,) * 50 if self.answers else ()
        if request.model == "painted":
            return Script(turns=(Turn(says=Reply(pictures=(Picture(data=PNG),)), delivery=delivery, first=first),))
        call = Reply(text="Let me look.", tool_calls=(ToolCall(name="weather", arguments={"city": "Zürich"}),))
        turns = (call, Reply(text="Take it along."))
        return Script(turns=tuple(Turn(says=says, delivery=delivery, first=first) for says in turns))

    async def load(self) -> None:
        """Requests of each kind, for ever; a server that refuses them gets them again."""
        send = sender(self.server, self.keys)
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                with suppress(RedisError, OSError, httpx.HTTPError):
                    await send("forecast", tools=[WEATHER])
                    await send("painted", provider="gemini")
                    if self.spending:
                        body = {"model": "anthropic/forecast", "messages": [{"role": "user", "content": "hello"}]}
                        url = self.worker("gateway").url
                        await http.post(f"{url}/v1/chat/completions", json=body, headers=auth(SPENDER))
                await asyncio.sleep(PAUSE_S)

    @property
    def workers(self) -> list[Worker]:
        return [*self.store.workers, *self.fleet.workers]

    def worker(self, kind: Kind) -> Worker:
        """The newest of this kind."""
        return next(worker for worker in reversed(self.workers) if worker.kind == kind)

    def watch(self) -> None:
        """Prometheus finds the workers that run."""
        running = [worker for worker in self.workers if worker.process.returncode is None]
        self.watching.watch([urlsplit(worker.url).netloc for worker in running])

    # --- the faults ---------------------------------------------------------------------------------------------

    async def slow_provider(self) -> None:
        self.delay_s = 8.0

    async def fast_provider(self) -> None:
        self.delay_s = 0.0

    async def full_server(self) -> None:
        used = (await self.server.client.info("memory"))["used_memory"]
        await self.server.client.config_set("maxmemory", int(used / 0.95))

    async def more_memory(self) -> None:
        await self.server.client.config_set("maxmemory", 0)

    async def wrong_clock(self) -> None:
        shift = self.directory / "shift"
        shift.mkdir(exist_ok=True)
        (shift / "sitecustomize.py").write_text(SHIFT.format(ahead=30))
        await self.fleet.start("normalizer", env={"PYTHONPATH": str(shift)})
        self.watch()

    async def right_clock(self) -> None:
        await self.worker("normalizer").stop()
        self.watch()

    async def spend(self) -> None:
        self.spending = True

    async def spend_no_more(self) -> None:
        self.spending = False

    async def kill_tools(self) -> None:
        self.worker("tools").kill()

    async def start_tools(self) -> None:
        await self.fleet.start("tools")
        self.watch()

    async def kill_store(self) -> None:
        self.worker("blobs").kill()

    async def start_store(self) -> None:
        await self.store.start("blobs", port=self.store_port)
        self.watch()

    async def freeze_parsers(self) -> None:
        for worker in self.workers:
            if worker.kind == "parser":
                worker.freeze()

    async def thaw_parsers(self) -> None:
        for worker in self.workers:
            if worker.kind == "parser" and worker.process.returncode is None:
                worker.thaw()

    async def hang_receiver(self) -> None:
        self.receiver.refusing = True

    async def receive(self) -> None:
        self.receiver.refusing = False

    async def lose_disk(self) -> None:
        gone = self.directory / "gone"
        gone.mkdir()
        await self.server.client.config_set("dir", str(gone))
        gone.rmdir()
        with suppress(RedisError):
            await self.server.client.bgsave()

    async def find_disk(self) -> None:
        await self.server.client.config_set("dir", str(self.process.data_dir))

        async def saved() -> bool:
            with suppress(RedisError):
                await self.server.client.bgsave()
            return (await self.server.client.info("persistence"))["rdb_last_bgsave_status"] == "ok"

        await eventually(saved)

    async def revoke_key(self) -> None:
        self.answers = Status(status=401)

    async def new_key(self) -> None:
        self.answers = None


class Planted(NamedTuple):
    plant: Callable[[Town], Awaitable[None]]
    repair: Callable[[Town], Awaitable[None]]
    page: str
    """How the row of the page of faults that helps begins to say what it is."""
    alerts: set[str]
    """What must fire."""
    beside: frozenset[str] = frozenset()
    """What is true as well, and may fire."""


FAULTS = {
    "slow provider": Planted(
        Town.slow_provider, Town.fast_provider, "A model's answers begin far later", {"TokenbusProviderSlow"}
    ),
    "full server": Planted(
        *(Town.full_server, Town.more_memory, "Above 90 % of `maxmemory` intake"),
        {"TokenbusServerFull", "TokenbusServerMemoryHigh"},
        frozenset({"TokenbusServerNearlyFull"}),
    ),
    "wrong clock": Planted(Town.wrong_clock, Town.right_clock, "A machine's clock is wrong", {"TokenbusClockWrong"}),
    "spent budget": Planted(
        Town.spend, Town.spend_no_more, "A client's key has spent its budget", {"TokenbusBudgetSpent"}
    ),
    "dead tool executor": Planted(
        Town.kill_tools, Town.start_tools, "No tool executor runs", {"TokenbusToolsGone", "TokenbusWorkerDown"}
    ),
    "dead blob store": Planted(
        Town.kill_store, Town.start_store, "No blob service runs", {"TokenbusBlobStoreGone", "TokenbusWorkerDown"}
    ),
    "stopped workers": Planted(
        *(Town.freeze_parsers, Town.thaw_parsers, "No worker of that stage runs"),
        {"TokenbusPartitionsWithoutOwner", "TokenbusWorkerDown"},
    ),
    "dead receiver": Planted(
        Town.hang_receiver, Town.receive, "A receiver of webhooks answers nothing", {"TokenbusWebhookAway"}
    ),
    "failing disk": Planted(
        Town.lose_disk, Town.find_disk, "The server cannot write to its disk", {"TokenbusServerDiskFails"}
    ),
    "revoked provider key": Planted(
        *(Town.revoke_key, Town.new_key, "A provider refuses the key", {"TokenbusProviderRefusesKey"}),
        frozenset({"TokenbusRunsFail"}),
    ),
}


def rows_of(alerts: set[str]) -> list[str]:
    """What a reader finds on the page of faults who knows only what fires: what it is, most special row first."""
    rows = [line.split(" | ") for line in FAULTS_PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [(len(alerts & set(re.findall(r"Tokenbus\w+", row[0]))), row[1]) for row in rows if len(row) == 3]
    return [what for hits, what in found if hits]


SETTINGS = f"""
[gateway]
[gateway.prices."anthropic/"]
input = 1000
output = 1000
[gateway.keys.spender]
sha256 = "{SPENDER.sha256}"
max_budget = 0.0001
[gateway.keys.metrics]
sha256 = "{METRICS.sha256}"
metrics = true
[records]
sample = 0.2
[retry]
base_delay_s = 0.2
max_attempts = 2
"""


@asynccontextmanager
async def town(directory: Path) -> AsyncGenerator[Town]:
    """The whole deployment under load, and a Prometheus that has looked for as long as its rules look back."""
    keys = Keys("town", 4)
    receiver = Refusing()
    async with AsyncExitStack() as stack:
        process = stack.enter_context(EmbeddedServer(binary=binary(), options={"enable-protected-configs": "yes"}))
        server = await stack.enter_async_context(Server(process.url))
        made = Town(directory, keys, process, server, receiver)
        provider = await stack.enter_async_context(MockProvider(choose=made.script_for))
        hook = await stack.enter_async_context(served(receiver))
        for name in ("stores", "others"):
            (directory / name).mkdir()
        toml = f"""
[blobs]
service_url = "http://127.0.0.1:{made.store_port}"
[webhooks.hook]
url = "{hook}"
secret_env = "HOOK_SECRET"
every_run = true
allow_private = true
{SETTINGS}"""
        made.store = Fleet(directory / "stores", process.url, keys, provider.url)
        made.fleet = Fleet(directory / "others", process.url, keys, provider.url, toml)
        stack.push_async_callback(made.store.stop)
        stack.push_async_callback(made.fleet.stop)
        await made.store.start("blobs", port=made.store_port)
        await made.fleet.start(*KINDS)
        made.watching = await stack.enter_async_context(
            prometheus(directory / "prometheus", [], quick=False, faster=FASTER, key=METRICS.text)
        )
        made.watch()
        loading = asyncio.create_task(made.load())
        try:
            yield made
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


async def firing(made: Town) -> set[str]:
    return {name for name, _ in await made.watching.firing()} - OF_THE_MACHINE


@pytest.mark.skipif(not os.environ.get("PLANTED"), reason="ten minutes, on a quiet machine only: PLANTED=1")
@needs_prometheus
@only_separate("its faults are of single services")
@pytest.mark.timeout(1800)
async def test_each_planted_fault_raises_its_alert_and_no_other_and_the_page_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", OLD)
    chosen = os.environ.get("TOKENBUS_FAULTS", ",".join(FAULTS)).split(",")
    random.shuffle(chosen)
    wrong: list[str] = []
    async with town(tmp_path) as made:

        async def is_quiet() -> bool:
            seen = await made.watching.value("sum(increase(tokenbus_provider_first_byte_seconds_count[60s]))")
            return (seen or 0) > 60 and not await firing(made)

        for name in chosen:
            fault = FAULTS[name]
            await eventually(is_quiet, timeout=240)
            await fault.plant(made)
            since = time.monotonic()

            async def fires(fault: Planted = fault) -> bool:
                return fault.alerts <= await firing(made)

            try:
                await eventually(fires, timeout=150)
                took_s = time.monotonic() - since
                seen: set[str] = set()
                for _ in range(LOOKS):
                    seen |= await firing(made)
                    await asyncio.sleep(1)
                print(f"{name}: {took_s:.0f} s, {sorted(seen)}", file=sys.stderr, flush=True)
                if false := seen - fault.alerts - fault.beside:
                    wrong.append(f"{name}: also {sorted(false)}")
                if not any(what.startswith(fault.page) for what in rows_of(seen)):
                    wrong.append(f"{name}: the page says {rows_of(seen)}")
            except AssertionError:
                wrong.append(f"{name}: {sorted(await firing(made))}, not {sorted(fault.alerts)}")
            finally:
                await fault.repair(made)
    assert wrong == []

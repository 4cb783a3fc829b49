"""A soak from its start to its verdict: a server, a process for each service, the mock provider, the load."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from tests.bench.procs import Processes, answers
from tests.chaos import guards, ledger, observer
from tests.chaos.stories import CONTINUING, LOOK, Stage
from tests.e2e.fleet import BASE_PATHS, provider_table
from tests.servers import binary
from tests.soak.judging import Finding, Series, Tolerance, judge
from tests.soak.load import Load
from tests.soak.sampling import Sampler
from tests.waiting import eventually
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus_services.mock_provider import MockProvider
from tokenbus_services.process.embedded_server import EmbeddedServer, free_port

SERVICES = ("fetcher", "normalizer", "parser", "tools", "policy", "recorder", "blobs")
PREFIX, PARTITIONS = "soak", 4
_INPUTS: tuple[InternalTopic, ...] = ("raw", "events", "drafts")
_SAMPLES = 400
_MOST_OPEN = 200
"""Concurrent runs while the machine's maximum rate is measured; also the upper limit later."""
_END_S = 60.0
_LONGEST_S = 120.0
"""Longer than any run, so no key of an open run expires."""
_PROCESS_KEYS = ("run:", "log:", "tape:")
"""Keys of single runs; each has a TTL."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Duration and intensity."""

    seconds: float
    share: float = 0.5
    """Share of the maximum rate of runs."""
    calibrate_s: float = 30.0
    """Seconds for measuring the maximum rate."""
    keep_s: float = 60.0
    """How long runs, records and blobs are kept: much less than the soak, so that as many expire as are added."""
    seed: str = "soak"
    tolerance: Tolerance = Tolerance()


class Result(msgspec.Struct, kw_only=True):
    saturated: float
    """Maximum runs per second."""
    runs: int
    outcomes: Counter[str]
    unended: list[str]
    """Runs that have not ended a minute after the last one began, each with its status."""
    left: list[str]
    """Keys of single runs that still exist after everything has ended."""
    complaints: list[str]
    """Errors in the services' logs."""
    findings: list[Finding]
    series: list[Series]

    @property
    def passed(self) -> bool:
        """Whether nothing grew, and nothing was left behind."""
        return all(f.flat for f in self.findings) and not (self.unended or self.left or self.complaints)


async def soak(plan: Plan, directory: Path) -> Result:
    """Run it. ``directory`` exists, and receives the services' logs. Raises RuntimeError if a process ends."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(directory / "server", binary=binary()))
        client: Any = await stack.enter_async_context(Redis(port=server.port))
        stage = Stage(plan.seed, PREFIX, guarded=0.35)
        provider = await stack.enter_async_context(MockProvider(choose=stage.script_for, keep=10))
        processes = await stack.enter_async_context(_services(plan, directory, server.url, provider.url))
        load = Load(client, stage, PARTITIONS)
        saturated = await load.saturate(_MOST_OPEN, plan.calibrate_s)
        _say(f"{saturated:.1f} runs a second at the most; now {plan.share:.0%} of that for {plan.seconds:.0f} s")
        clock = asyncio.get_running_loop().time
        begin = clock()
        keys = Keys(PREFIX, PARTITIONS)
        inputs = [keys.topic(n, topic) for n in range(PARTITIONS) for topic in _INPUTS]
        sampler = Sampler({**processes.pids, "server": server.pid}, client, inputs)
        loading = asyncio.create_task(load.keep(plan.share * saturated, _MOST_OPEN, begin + plan.seconds))
        while not loading.done():
            await sampler.sample(clock() - begin)
            processes.check()
            await asyncio.wait({loading}, timeout=max(0.25, plan.seconds / _SAMPLES))
        await loading
        await load.stop()
        unended = await _ended(load)
        _say("all is begun; waiting for what is kept to go")
        left = await _gone(client, plan.keep_s)
        return Result(
            saturated=saturated,
            runs=load.begun,
            outcomes=load.outcomes,
            unended=unended,
            left=left,
            complaints=_complaints(directory),
            findings=judge(sampler.series, plan.tolerance),
            series=sampler.series,
        )


async def _ended(load: Load) -> list[str]:
    async def none_open() -> bool:
        await load.look()
        return not load.open

    try:
        await eventually(none_open, timeout=_END_S)
    except AssertionError:
        return [f"{run}: {await load.status(run)}" for run in sorted(load.open)]
    return []


async def _gone(client: Any, keep_s: float) -> list[str]:
    """Wait until all keys of single runs have expired; return those that have not."""

    async def left() -> list[str]:
        names = [fact.name for fact in await observer.keys_of(client, PREFIX)]
        return [name for name in names if any(f"}}:{part}" in name for part in _PROCESS_KEYS)]

    async def none_left() -> bool:
        return not await left() and await observer.at_rest(client, PREFIX, PARTITIONS)

    try:
        await eventually(none_left, timeout=2 * keep_s + 60)
    except AssertionError:
        return await left() or ["the queues or the stages are not at rest"]
    return []


@asynccontextmanager
async def _services(plan: Plan, directory: Path, redis_url: str, provider_url: str) -> AsyncGenerator[Processes]:
    ports = {name: free_port() for name in SERVICES}
    config = directory / "tokenbus.toml"
    config.write_text(_settings(plan, directory, redis_url, provider_url, ports))
    env = {"TOKENBUS_CONFIG": str(config), ledger.PATH: str(directory / "ledger.jsonl")}
    processes = Processes(directory)
    try:
        for name in SERVICES:
            processes.start(name, "tokenbus_services.cli", "worker", name, env=env)
        for name, port in ports.items():
            url = f"http://127.0.0.1:{port}/ready"
            await asyncio.to_thread(processes.until, lambda url=url: answers(url), name)
        yield processes
    finally:
        await asyncio.to_thread(processes.__exit__, None, None, None)


def _complaints(directory: Path) -> list[str]:
    return [
        f"{log.name}: {line[:300]}"
        for log in sorted(directory.glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if '"level": "error"' in line or line.startswith("Traceback")
    ]


def _say(what: str) -> None:
    print(f"soak: {what}", file=sys.stderr, flush=True)


def _settings(plan: Plan, directory: Path, redis_url: str, provider_url: str, ports: dict[str, int]) -> str:
    # Some answers of the load stall: this is noticed well within the time in which the last runs must end.
    timeouts = "first_event_timeout_s = 10.0\nidle_timeout_s = 10.0"
    tables = [provider_table(api, api, provider_url, timeouts) for api in BASE_PATHS]
    continues = f'{timeouts}\nquirks = {{ continues = "message" }}'
    tables.append(provider_table(CONTINUING, "openai-chat", provider_url, continues))
    return f"""
redis_url = "{redis_url}"
prefix = "{PREFIX}"
partitions = {PARTITIONS}
data_dir = "{directory}"
log_level = "warning"
{"".join(tables)}
[tools.{LOOK["name"]}]
kind = "python"
call = "tests.chaos.ledger:look"

{guards.settings()}
[records]
sample = 0.05
keep_s = {plan.keep_s}
keep_entries = 50

[blobs]
service_url = "http://127.0.0.1:{ports["blobs"]}"
ttl_s = {plan.keep_s}

[retry]
base_delay_s = 0.05
max_delay_s = 1.0

[retention]
open_run_s = {plan.keep_s + _LONGEST_S}
finished_run_s = {plan.keep_s}
topic_entries = 1000
dead_entries = 100

[http]
{chr(10).join(f"{name} = {port}" for name, port in ports.items())}
"""

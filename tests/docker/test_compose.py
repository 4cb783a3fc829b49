"""compose.yaml: everything up, runs through it, and what happens to containers in the life of a deployment."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest

from tests.docker.stack import PROVIDER_KEYS, SERVICES, Stack, docker, inspect, kill_inside
from tests.e2e import judge
from tests.e2e.conftest import WEATHER
from tests.e2e.fleet import ended, log_of
from tests.waiting import eventually, eventually_sync
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Reply
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT, demo_scripts
from tokenbus_services.weather import weather

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]  # the first of them builds the image

KEYS = Keys()
RUNS = 6


async def send(bus: Server, count: int = RUNS) -> list[str]:
    """Publish the demo's request this many times for both APIs; return the runs' ids."""
    runs = [f"run-{uuid4().hex[:12]}" for _ in range(count)]
    for i, run in enumerate(runs):
        request = {
            "type": "generate",
            "id": run,
            "provider": ("anthropic", "openai-chat")[i % 2],
            "model": DEMO_MODEL,
            "messages": [{"role": "user", "content": f"{run}: {DEMO_PROMPT}"}],
            "tools": [WEATHER],
            "on_failure": "restart",  # a run whose fetcher died restarts, and its text is whole
        }
        await bus.client.xadd(KEYS.requests, {DATA_FIELD: msgspec.json.encode(request)})
    return runs


async def streaming(bus: Server, runs: list[str]) -> None:
    """Wait until each of them is in the middle of its first turn."""

    async def begun() -> bool:
        return all([await bus.client.xlen(KEYS.log(run)) > 5 for run in runs])

    await eventually(begun, timeout=30)
    for run in runs:
        assert not await bus.client.hexists(KEYS.run(run), "result"), "ended before anything happened to it"


async def check(bus: Server, runs: list[str]) -> None:
    """Each run ends completed, its log without a flaw, and what counts of it is exactly the conversation."""
    first, last = (turn.says for turn in demo_scripts()[0].turns)
    assert isinstance(first, Reply)
    assert isinstance(last, Reply)
    for log in (await ended(bus.client, KEYS, runs, timeout=120)).values():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        blocks = judge.blocks(log)
        result = blocks.pop(3)
        assert blocks == [
            ("thinking", first.thinking),
            ("text", first.text),
            ("tool_call", first.tool_calls[0].raw),
            ("text", last.text),
        ]
        assert (result[0], msgspec.json.decode(result[1])) == ("tool_result", weather("Zürich"))


async def test_a_request_from_outside_runs_through_all_containers(stack: Stack, bus: Server):
    await check(bus, await send(bus))


async def test_the_tokenbus_command_in_a_container_follows_a_run(stack: Stack):
    message = ("--provider", "anthropic", "--model", DEMO_MODEL, "--text", DEMO_PROMPT)
    lines = stack.compose("exec", "-T", "parser", "tokenbus", "send", *message, "--follow", "--json").splitlines()
    log: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines]
    judge.check(log)
    assert log[-1]["type"] == "completed"


async def test_every_container_reports_healthy_and_not_once_its_server_is_away(stack: Stack):
    one_each = [container for service in SERVICES for container in stack.containers(service)]
    eventually_sync(lambda: all(_health(one) == "healthy" for one in one_each), timeout=40)
    stack.compose("stop", "valkey")
    for service in ("fetcher", "normalizer", "parser", "tools"):
        eventually_sync(lambda s=service: not stack.ready(s), timeout=20)


async def test_four_parsers_share_the_partitions_and_go_back_to_one(stack: Stack, bus: Server):
    runs = await send(bus)
    await streaming(bus, runs)
    stack.up(parser=4)
    parsers = {container[:12] for container in stack.containers("parser")}
    assert len(parsers) == 4
    await eventually(lambda: _shares(bus, parsers), timeout=30)
    more = await send(bus)
    await streaming(bus, more)
    stack.up(parser=1)
    await check(bus, runs + more)
    await eventually(lambda: _shares(bus, {container[:12] for container in stack.containers("parser")}), timeout=30)


async def test_the_runs_of_a_removed_parser_continue_in_the_others(stack: Stack, bus: Server):
    stack.up(parser=4)
    parsers = stack.containers("parser")
    await eventually(lambda: _shares(bus, {container[:12] for container in parsers}), timeout=30)
    runs = await send(bus)
    await streaming(bus, runs)
    docker("kill", *parsers[:2])
    await check(bus, runs)
    assert set(stack.containers("parser")) == set(parsers[2:])


@pytest.mark.parametrize("service", ["fetcher", "normalizer", "parser"])
async def test_a_service_that_crashes_is_started_again_and_its_runs_complete_exactly(
    stack: Stack, bus: Server, service: str
):
    [container] = stack.containers(service)
    before = inspect(container)["RestartCount"]
    runs = await send(bus)
    await streaming(bus, runs)
    kill_inside(container)
    await check(bus, runs)
    assert inspect(container)["RestartCount"] == before + 1


async def test_running_calls_of_a_crashed_executor_are_repeated(stack: Stack, bus: Server):
    runs = await send(bus)
    [container] = stack.containers("tools")

    async def all_called() -> bool:
        taken = [await bus.client.xpending(KEYS.topic(p, "tools"), "tools") for p in range(KEYS.partitions)]
        return sum(group["pending"] for group in taken) == len(runs)

    await eventually(all_called, timeout=30)
    kill_inside(container)
    await check(bus, runs)


@pytest.mark.parametrize("order", ["restart", "kill"])
async def test_runs_outlive_their_server(stack: Stack, bus: Server, order: str):
    runs = await send(bus)
    await streaming(bus, runs)
    stack.compose(order, "valkey")
    stack.up()
    async with Server(stack.redis_url) as again:
        await check(again, runs)


async def test_the_project_stops_cleanly_and_finds_its_data_again(stack: Stack, bus: Server):
    [run] = await send(bus, 1)
    await check(bus, [run])
    log = await log_of(bus.client, KEYS, run)
    blob = (await _blobs(stack, "PUT", "/blobs", b"kept")).json()
    containers = stack.containers()
    stack.compose("stop")
    assert Counter(inspect(one)["State"]["ExitCode"] for one in containers) == {0: len(containers)}
    stack.up()
    eventually_sync(stack.ready, timeout=60)
    async with Server(stack.redis_url) as again:
        assert await log_of(again.client, KEYS, run) == log
    assert (await _blobs(stack, "GET", f"/blobs/{blob['blob_id']}")).content == b"kept"


async def test_only_the_fetcher_is_given_the_keys_of_providers(stack: Stack):
    for service in SERVICES:
        [container] = stack.containers(service)
        given = inspect(container)["Config"]["Env"]
        assert ({f"{name}={key}" for name, key in PROVIDER_KEYS.items()} <= set(given)) is (service == "fetcher")
        assert any("API_KEY" in variable for variable in given) is (service == "fetcher")


async def test_containers_are_read_only_and_hold_no_privilege(stack: Stack):
    for service in SERVICES:
        [container] = stack.containers(service)
        settings = inspect(container)["HostConfig"]
        assert settings["ReadonlyRootfs"]
        assert settings["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in settings["SecurityOpt"]


def _health(container: str) -> str:
    return inspect(container)["State"]["Health"]["Status"]


async def _shares(bus: Server, parsers: set[str]) -> bool:
    """Whether these containers own the partitions among them, in equal parts."""
    leases = [await bus.client.hget(KEYS.lease(p, "parser"), "owner") for p in range(KEYS.partitions)]
    owned = Counter(lease.decode().partition("-")[0] for lease in leases if lease)
    return owned == dict.fromkeys(parsers, KEYS.partitions // len(parsers))


async def _blobs(stack: Stack, method: str, path: str, body: bytes | None = None) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.blobs_url) as client:
        answer = await client.request(method, path, content=body)
        assert answer.is_success, answer.text
        return answer

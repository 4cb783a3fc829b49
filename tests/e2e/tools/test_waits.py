"""Runs that wait for a person or a client: each door, one fate, and the tool's calls."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from tests.waiting import eventually
from tokenbus import Client, Run, WaitInfo
from tokenbus.errors import AlreadyDecided, RequestInvalid, WaitNotFound
from tokenbus.events.public import BlockComplete, Completed, PublicEvent, Resumed, Waiting
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, ToolCall

SCHEMA = '{ type = "object", properties = { amount = { type = "integer" } }, required = ["amount"] }'
SETTINGS = f"""
[gateway]
tools = ["pay", "show"]
[tools.pay]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays."
parameters = {SCHEMA}
approval = {{ amount = {{ exclusiveMinimum = 100 }} }}
[tools.quick]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays at once, unless somebody says no."
parameters = {SCHEMA}
approval = "always"
approval_timeout_s = 0.2
approval_on_deadline = "allow"
[tools.show]
kind = "client"
description = "Shows something on the client's screen."
parameters = {{ type = "object" }}
result = {{ type = "object", properties = {{ seen = {{ type = "boolean" }} }}, required = ["seen"] }}
[tools.gone]
kind = "client"
description = "Nobody returns its result."
timeout_s = 0.2
"""


def calls(*made: tuple[str, dict[str, object]]) -> Reply:
    return Reply(tool_calls=tuple(ToolCall(name=name, arguments=arguments) for name, arguments in made))


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("pays", calls(("pay", {"amount": 500})), "Done.")
        running.model_says("pays little", calls(("pay", {"amount": 5})), "Done.")
        running.model_says("pays twice", calls(("pay", {"amount": 500}), ("pay", {"amount": 900})), "Done.")
        running.model_says("quick", calls(("quick", {"amount": 1})), "Done.")
        running.model_says("shows", calls(("show", {})), "Done.")
        running.model_says("gone", calls(("gone", {})), "Done.")
        yield running


@pytest.fixture
async def client(bus: LocalBus) -> AsyncGenerator[Client]:
    async with bus.client() as client:
        yield client


async def begun(client: Client, bus: LocalBus, model: str, *tools: str, waits: int = 1, **more: Any) -> Run:
    """A run that waits."""
    run = await client.publish(bus.request(model, tools=[{"name": name} for name in tools], **more))
    await eventually(lambda: is_waiting(client, run, waits))
    return run


async def is_waiting(client: Client, run: Run, waits: int) -> bool:
    return len(await waits_of(client, run)) == waits


async def waits_of(client: Client, run: Run) -> list[WaitInfo]:
    async with aclosing(client.waiting(run=run)) as listed:
        return [info async for info in listed]


async def events_of(run: Run) -> list[PublicEvent]:
    async with aclosing(run.events()) as events:
        return [event async for event in events]


def results(events: list[PublicEvent]) -> list[str | None]:
    return [e.content for e in events if isinstance(e, BlockComplete) and e.kind == "tool_result"]


def resumed(events: list[PublicEvent]) -> list[tuple[str, str, str | None, str]]:
    return [(e.wait, e.decision, e.by, e.door) for e in events if isinstance(e, Resumed)]


async def test_a_call_runs_after_somebody_allowed_it_and_one_that_fulfils_no_condition_at_once(
    bus: LocalBus, client: Client
) -> None:
    run = await begun(client, bus, "pays", "pay", metadata={"tenant": "acme"})
    (info,) = await waits_of(client, run)
    assert (info.what, info.tool_name, info.arguments, info.tenant) == ("approval", "pay", '{"amount":500}', "acme")
    async with aclosing(client.waiting(tenant="acme")) as listed:
        assert [each.run async for each in listed] == [run.id]
    assert (await client.describe([run]))[run.id].state == "waiting"
    fate = await client.approve(run, info.wait, by="ann", decision_id="d1")
    assert (fate.decision, fate.by, fate.door) == ("allow", "ann", "bus")
    assert await client.approve(run, info.wait, by="ann", decision_id="d1") == fate, "it is the same decision"
    with pytest.raises(AlreadyDecided) as late:
        await client.deny(run, info.wait, "too dear", by="bob")
    assert late.value.fate == fate
    events = await events_of(run)
    assert results(events) == ['{"amount":500}']
    assert resumed(events) == [(info.wait, "allow", "ann", "bus")]
    assert isinstance(events[-1], Completed)
    assert await waits_of(client, run) == []
    with pytest.raises(AlreadyDecided):
        await client.deny(run, info.wait)

    at_once = await client.publish(bus.request("pays little", tools=[{"name": "pay"}]))
    assert not any(isinstance(e, Waiting) for e in await events_of(at_once))


async def test_several_calls_are_decided_in_any_order_and_one_with_other_arguments(
    bus: LocalBus, client: Client
) -> None:
    run = await begun(client, bus, "pays twice", "pay", waits=2)
    first, second = await waits_of(client, run)
    with pytest.raises(RequestInvalid, match=r"arguments\.amount"):
        await client.approve(run, second.wait, arguments={"amount": "much"})
    with pytest.raises(RequestInvalid, match="'approval'"):
        await client.tool_result(run, second.wait, "paid")
    await client.approve(run, second.wait, arguments={"amount": 1})
    await client.deny(run, first.wait, "too dear")
    events = await events_of(run)
    assert results(events) == ["the call was denied, and did not run: too dear", '{"amount":1}']
    read = bus.requests[-1]["messages"][-1]
    assert '[a person changed the arguments of this call to {\\"amount\\":1}]' in str(read).replace('"', '\\"')


async def test_the_deadline_decides_as_the_settings_say(bus: LocalBus, client: Client) -> None:
    run = await client.publish(bus.request("quick", tools=[{"name": "quick"}]))
    events = await events_of(run)
    assert results(events) == ['{"amount":1}']
    assert [(d, door) for _, d, _, door in resumed(events)] == [("allow", "deadline")]


async def test_a_client_returns_the_result_of_its_own_tool(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "shows", "show")
    (info,) = await waits_of(client, run)
    assert (info.what, info.schema is not None) == ("tool_result", True)
    with pytest.raises(RequestInvalid, match="seen"):
        await client.tool_result(run, info.wait, {})
    await client.tool_result(run, info.wait, {"seen": True})
    assert results(await events_of(run)) == ['{"seen":true}']
    lost = await client.publish(bus.request("gone", tools=[{"name": "gone"}]))
    assert results(await events_of(lost)) == ["the client returned no result in time"]


async def test_a_request_asks_for_more_approvals_and_brings_tools_of_its_own(bus: LocalBus, client: Client) -> None:
    asks: dict[str, Any] = {"name": "pay", "approval": "always"}
    run = await client.publish(bus.request("pays little", tools=[asks]))
    await eventually(lambda: is_waiting(client, run, 1))
    (info,) = await waits_of(client, run)
    await client.approve(run, info.wait)
    assert results(await events_of(run)) == ['{"amount":5}']
    less = await begun(client, bus, "pays", "pay", waits=1)
    never: dict[str, Any] = {"name": "pay", "approval": "never"}
    run = await client.publish(bus.request("pays", tools=[never]))
    await eventually(lambda: is_waiting(client, run, 1))
    for each in (less, run):
        await each.cancel()
    bus.model_says("own", calls(("own", {"x": 1})), "Done.")
    own = {"name": "own", "kind": "client", "description": "Mine.", "parameters": {"type": "object"}}
    run = await client.publish(bus.request("own", tools=[own]))
    await eventually(lambda: is_waiting(client, run, 1))
    await client.tool_result(run, (await waits_of(client, run))[0].wait, "mine", is_error=True)
    assert results(await events_of(run)) == ["mine"]


async def test_a_run_that_ends_waits_for_nothing(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay")
    (info,) = await waits_of(client, run)
    await run.cancel()
    events = await events_of(run)
    assert results(events) == ["cancelled"]
    assert await waits_of(client, run) == []
    with pytest.raises(WaitNotFound):
        await client.approve(run, info.wait)
    with pytest.raises(WaitNotFound):
        await client.approve("no-such-run", "0.0")


async def test_of_many_decisions_at_once_one_counts(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay")
    (info,) = await waits_of(client, run)

    async def decide(n: int) -> bool:
        try:
            if n % 2:
                await client.approve(run, info.wait, by=str(n))
            else:
                await client.deny(run, info.wait, by=str(n))
        except AlreadyDecided:
            return False
        return True

    counted = await asyncio.gather(*(decide(n) for n in range(10)))
    events = await events_of(run)
    (_, decision, by, _) = next(iter(resumed(events)))
    assert [str(n) for n, each in enumerate(counted) if each] == [by]
    ran = results(events) == ['{"amount":500}']
    assert ran == (decision == "allow")


def over_http(bus: LocalBus, method: str, path: str, **more: Any) -> httpx.Response:
    return httpx.request(method, f"{bus.gateway}{path}", **more)


async def test_the_door_of_the_gateway(bus: LocalBus, client: Client) -> None:
    run = await begun(client, bus, "pays", "pay")
    listed = over_http(bus, "GET", "/waiting").json()["waiting"]
    assert run.id in [each["run"] for each in listed]
    (info,) = over_http(bus, "GET", f"/runs/{run.id}/waiting").json()["waiting"]
    path = f"/runs/{run.id}/waiting/{info['wait']}"
    wrong = over_http(bus, "POST", path, json={"type": "approval", "decision": "allow", "arguments": {}})
    assert (wrong.status_code, "amount" in wrong.text) == (400, True)
    denial = {"type": "approval", "decision": "deny", "reason": "no", "by": "ann"}
    denied = over_http(bus, "POST", path, json=denial, headers={"idempotency-key": "one"})
    assert (denied.status_code, denied.json()["decision"], denied.json()["id"]) == (200, "deny", "one")
    assert over_http(bus, "POST", path, json=denial, headers={"idempotency-key": "one"}).json() == denied.json()
    late = over_http(bus, "POST", path, json={"type": "approval", "decision": "allow"})
    assert (late.status_code, "already_decided" in late.text) == (409, True)
    unknown = over_http(bus, "POST", f"/runs/{run.id}/waiting/99.0", json={"type": "approval", "decision": "allow"})
    assert unknown.status_code == 404
    events = await events_of(run)
    assert resumed(events) == [(info["wait"], "deny", "ann", "http")]


async def test_the_commands(bus: LocalBus, client: Client) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tokenbus_services.cli", *arguments],
            env={**os.environ, **bus.environment},
            capture_output=True,
            text=True,
            check=False,
        )

    run = await begun(client, bus, "pays twice", "pay", waits=2)
    listed = command("waiting", run.id)
    assert [line.split("  ")[2:4] for line in listed.stdout.splitlines()] == [
        ["approval", 'pay {"amount":500}'],
        ["approval", 'pay {"amount":900}'],
    ]
    several = command("approve", run.id)
    assert (several.returncode, "name one" in several.stderr) == (2, True)
    first, second = (line.split("  ")[1] for line in listed.stdout.splitlines())
    assert command("deny", run.id, first, "--reason", "no", "--by", "ann").returncode == 0
    assert command("approve", run.id, "--arguments", '{"amount": 7}', "--by", "ann").returncode == 0
    late = command("deny", run.id, second)
    assert (late.returncode, "decided before: allow by ann, over cli" in late.stderr) == (1, True)
    events = await events_of(run)
    assert results(events) == ["the call was denied, and did not run: no", '{"amount":7}']
    assert [(by, door) for _, _, by, door in resumed(events)] == [("ann", "cli")] * 2


def test_the_client_without_asyncio(bus: LocalBus) -> None:
    with bus.sync_client() as client:
        run = client.publish(bus.request("pays", tools=[{"name": "pay"}]))
        waiting = next(event for event in run.events() if isinstance(event, Waiting))
        assert [info.wait for info in client.waiting(run=run)] == [waiting.wait]
        assert client.approve(run, waiting.wait).decision == "allow"
        assert run.result().status == "completed"

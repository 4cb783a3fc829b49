"""A budget holds at two gateways, whatever comes at once, and also if one of them is killed."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.gateway.served import auth, second_gateway
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.budgets.spend import ClientSpend, read_spend
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import Reply, Stall, Turn

NAMES = ("crowd", "killed", "refused", "deleted", "session")
KEYS = {name: new_key() for name in NAMES}
TOKENS = 100
COST = 0.1
"""Of a call that uses all of its tokens."""
BUDGET = 0.5
ADMITTED = 5
SETTINGS = """
[gateway]
[gateway.prices."anthropic/"]
input = 0
output = 1000
""" + "".join(
    f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\nmax_budget = {BUDGET}\nmax_tokens = {TOKENS}\n'
    for name, key in KEYS.items()
)


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        long = Reply(text=" ".join(["word"] * TOKENS))
        running.model_says("slow", Turn(says=long, fault=Stall(after_events=2)))
        running.model_says("text", long)
        yield running


async def ask(client: httpx.AsyncClient, gateway: str, name: str, model: str = "text", **more: Any) -> tuple[int, str]:
    """Status, and the run or the error's code."""
    body = {"model": f"anthropic/{model}", "messages": [{"role": "user", "content": "hello"}], **more}
    answer = await client.post(f"{gateway}/runs", json=body, headers=auth(KEYS[name]))
    found = answer.json()
    return answer.status_code, found["run"] if answer.status_code == 202 else found["error"]["code"]


async def spend_of(bus: LocalBus, name: str) -> ClientSpend:
    async with Server(bus.url) as server:
        [spend] = await read_spend(server, Keys(), [name])
        return spend


async def settled(bus: LocalBus, name: str, *, runs: int) -> ClientSpend:
    """What was spent once all runs have ended and are counted; nothing is reserved then."""

    async def counted() -> ClientSpend | None:
        for exchange in bus.exchanges:
            bus.resume(exchange)
        spend = await spend_of(bus, name)
        return spend if spend.total.runs == runs and spend.reserved == 0 else None

    spend = await eventually(counted)
    assert spend
    return spend


async def test_of_a_hundred_calls_at_once_at_two_gateways_no_more_run_than_the_budget_pays(
    bus: LocalBus, tmp_path: Path
) -> None:
    async with second_gateway(bus, tmp_path, SETTINGS) as (other, _), httpx.AsyncClient(timeout=120) as client:
        gateways = (bus.gateway, other)
        answers = await asyncio.gather(*(ask(client, gateways[n % 2], "crowd", "slow") for n in range(100)))
        assert Counter(status for status, _ in answers) == {202: ADMITTED, 429: 100 - ADMITTED}
        assert {code for status, code in answers if status == 429} == {"budget_reserved"}
        assert (await spend_of(bus, "crowd")).reserved == pytest.approx(BUDGET)
        spend = await settled(bus, "crowd", runs=ADMITTED)
        assert spend.total.cost <= BUDGET + COST
        assert spend.total.cost == pytest.approx(ADMITTED * COST)
        assert await ask(client, other, "crowd") == (402, "budget_exceeded")


async def test_what_a_killed_gateway_reserved_is_settled_by_another_one_and_only_once(
    bus: LocalBus, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        async with second_gateway(bus, tmp_path, SETTINGS) as (other, worker):
            answers = [await ask(client, other, "killed", "slow") for _ in range(ADMITTED)]
            assert {status for status, _ in answers} == {202}
            await worker.stop(signal.SIGKILL)
        assert await ask(client, bus.gateway, "killed") == (429, "budget_reserved")
        spend = await settled(bus, "killed", runs=ADMITTED)
        assert spend.total.cost == pytest.approx(ADMITTED * COST)
        assert await ask(client, bus.gateway, "killed") == (402, "budget_exceeded")


async def test_a_request_that_the_bus_refuses_reserves_nothing_any_more(bus: LocalBus) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        status, _ = await ask(client, bus.gateway, "refused", policies=["of-nobody"])
        assert status == 400
        await settled(bus, "refused", runs=0)


async def test_a_run_whose_id_was_used_before_and_deleted_is_reserved_and_counted_as_any_other(bus: LocalBus) -> None:
    async with httpx.AsyncClient(timeout=120, headers=auth(KEYS["deleted"]), base_url=bus.gateway) as client:
        for runs in range(1, ADMITTED + 1):
            status, run = await ask(client, bus.gateway, "deleted", id="the-same")
            assert status == 202
            await settled(bus, "deleted", runs=runs)
            assert (await client.delete("/v1/responses/the-same")).status_code == 200
            assert (await client.get(f"/runs/{run}")).status_code == 404
        assert (await spend_of(bus, "deleted")).total.cost == pytest.approx(ADMITTED * COST)
        assert await ask(client, bus.gateway, "deleted", id="the-same") == (402, "budget_exceeded")


async def test_an_append_whose_id_was_used_before_its_session_was_deleted_is_reserved_and_counted(
    bus: LocalBus,
) -> None:
    async with httpx.AsyncClient(timeout=120, headers=auth(KEYS["session"]), base_url=bus.gateway) as client:

        async def append(item: dict[str, Any], **more: Any) -> tuple[int, Any]:
            answer = await client.post("/sessions/again/events", json={"item": item, **more})
            return answer.status_code, answer.json()

        say = {"type": "message", "content": "hello"}
        for runs in range(1, ADMITTED + 1):
            configure = {"type": "configure", "request": {"model": "anthropic/text", "max_tokens": TOKENS}}
            assert (await append(configure))[0] == 200
            assert (await append(say, id="the-same"))[0] == 200
            await settled(bus, "session", runs=runs)
            assert (await client.delete("/sessions/again")).status_code in (200, 204)
        assert (await spend_of(bus, "session")).total.cost == pytest.approx(ADMITTED * COST)
        status, refused = await append(configure)
        assert (status, refused["error"]["code"]) == (402, "budget_exceeded")

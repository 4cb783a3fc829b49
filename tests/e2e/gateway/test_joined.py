"""Several requests share a run, at two gateways: whose disconnect ends it."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.e2e.gateway.served import second_gateway
from tests.waiting import eventually
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, Stall, Turn

SETTINGS = "[gateway]\nrejoin_s = 0.2\n"
BODY: dict[str, Any] = {
    "model": "anthropic/slow",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        yield running


@asynccontextmanager
async def poster(url: str, *, key: str = "", run: str = "", **headers: str) -> AsyncGenerator[str]:
    """A client that reads a stream for as long as the block lasts; its run."""
    given = {"idempotency-key": key} if key else {}
    body = {**BODY, "tokenbus": {"run": run}} if run else BODY
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body, headers={**given, **headers}) as answer,
    ):
        lines = answer.aiter_lines()  # httpx closes the connection once this iterator is dropped
        await anext(lines)
        yield answer.headers["x-tokenbus-run"]


async def status_of(bus: LocalBus, run: str) -> str:
    async with httpx.AsyncClient(timeout=60) as client:
        return (await client.get(f"{bus.gateway}/runs/{run}")).json()["status"]


async def ends(bus: LocalBus, run: str) -> None:
    async def has_ended() -> bool:
        return await status_of(bus, run) == "cancelled"

    await eventually(has_ended)


async def a_lone_client_leaves(bus: LocalBus, url: str) -> None:
    """Return once the run of a client that left now is cancelled: what earlier disconnects end has ended, too."""
    async with poster(url, key=uuid4().hex) as alone:
        pass
    await ends(bus, alone)


@pytest.mark.parametrize("leaves_first", ["the first", "the second"])
async def test_a_run_of_an_idempotency_key_ends_with_the_last_client_that_has_it(
    bus: LocalBus, tmp_path: Path, leaves_first: str
) -> None:
    key = uuid4().hex
    async with (
        second_gateway(bus, tmp_path, SETTINGS) as (other, _),
        AsyncExitStack() as first,
        AsyncExitStack() as second,
    ):
        run = await first.enter_async_context(poster(bus.gateway, key=key))
        assert await second.enter_async_context(poster(other, key=key)) == run
        leaver, reader = (first, second) if leaves_first == "the first" else (second, first)
        await leaver.aclose()
        await a_lone_client_leaves(bus, other if leaver is second else bus.gateway)
        assert await status_of(bus, run) == "open"
        await reader.aclose()
        await ends(bus, run)


async def test_a_client_that_joins_a_run_by_its_id_reads_it_and_does_not_end_it(bus: LocalBus, tmp_path: Path) -> None:
    run = f"mine-{uuid4().hex}"
    async with second_gateway(bus, tmp_path, SETTINGS) as (other, _), AsyncExitStack() as owner:
        assert await owner.enter_async_context(poster(bus.gateway, run=run)) == run
        async with poster(other, run=run) as joined:
            assert joined == run
        await a_lone_client_leaves(bus, other)
        assert await status_of(bus, run) == "open"
        await owner.aclose()
        await ends(bus, run)


async def test_a_run_that_is_to_continue_is_not_ended_by_another_client_that_has_it(bus: LocalBus) -> None:
    key = uuid4().hex
    async with poster(bus.gateway, key=key, **{"x-tokenbus-on-disconnect": "continue"}) as run:
        pass
    async with poster(bus.gateway, key=key) as joined:
        assert joined == run
    await a_lone_client_leaves(bus, bus.gateway)
    assert await status_of(bus, run) == "open"
    async with httpx.AsyncClient(timeout=60) as client:
        await client.post(f"{bus.gateway}/runs/{run}/cancel")
    await ends(bus, run)


async def test_the_clients_of_a_gateway_that_was_killed_hold_no_run(bus: LocalBus, tmp_path: Path) -> None:
    key = uuid4().hex
    async with second_gateway(bus, tmp_path, SETTINGS) as (other, gateway), AsyncExitStack() as there:
        async with poster(bus.gateway, key=key) as run:
            assert await there.enter_async_context(poster(other, key=key)) == run
            await gateway.stop(signal.SIGKILL)
        await ends(bus, run)

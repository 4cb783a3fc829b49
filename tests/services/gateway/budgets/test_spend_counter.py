"""Spend is counted once, also if a counter dies, and at the price of the model that answered."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.contract.client.writer import Writer
from tests.services.gateway.budgets.counting import counter
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.gateway import NANO, AdmissionLimits, HoldKeys, Reservation, admit
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import Cancelled, Completed, Incomplete, RunFailedEvent, Started, Timing, UsageReported
from tokenbus.events.requests import Generate, Message
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.gateway.budgets.spend import ClientSpend, read_spend

NOTE = {"gateway": {"surface": "native", "version": 1, "created": 1, "model": "m", "key": "ada"}}
MILLION = 1_000_000
BUSY = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
END: dict[str, Any] = {"finish": "stop", "timing": Timing(total_ms=1)}


@pytest.fixture
async def bus(server_url: str, keys: Keys) -> AsyncGenerator[Client]:
    async with Client(server_url, prefix=keys.prefix, partitions=keys.partitions) as bus:
        yield bus


class Scene:
    def __init__(self, server: Server, keys: Keys, bus: Client) -> None:
        self.server = server
        self.keys = keys
        self.bus = bus
        self.counter: SpendCounter = counter(server, bus, keys)

    async def started(self, run: str, **fields: Any) -> Writer:
        writer = Writer(self.server, self.keys, run)
        await writer.accept()
        about = {"provider": "anthropic", "model": "claude-opus", "metadata": NOTE}
        await writer.write((Started, {**about, **fields}))
        return writer

    @asynccontextmanager
    async def counting(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self.counter.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def spend(self) -> ClientSpend:
        [spend] = await read_spend(self.server, self.keys, ["ada"])
        return spend

    async def spent_at_least(self, cost: float) -> bool:
        return (await self.spend()).total.cost >= cost

    async def wrote_more_than(self, tokens: int) -> bool:
        return (await self.spend()).total.output > tokens

    async def counted(self, *, runs: int) -> ClientSpend:
        async def all_counted() -> bool:
            return (await self.spend()).total.runs >= runs

        async with self.counting():
            await eventually(all_counted)
        return await self.spend()


@pytest.fixture
def scene(server: Server, keys: Keys, bus: Client) -> Scene:
    return Scene(server, keys, bus)


def reported(usage: Usage, total: Usage | None = None, **fields: Any) -> tuple[Any, dict[str, Any]]:
    return UsageReported, {"usage": usage, "total": total or usage, **fields}


async def test_a_run_costs_what_its_tokens_cost(scene: Scene) -> None:
    usage = Usage(input=MILLION, output=MILLION, cache_read=2 * MILLION, cache_write=4 * MILLION)
    run = await scene.started("r1")
    await run.write(reported(usage, model="claude-opus-20260101"), (Completed, {**END, "usage": usage}))
    spend = await scene.counted(runs=1)
    assert spend.total.cost == pytest.approx(3 + 15 + 0.6 + 15)
    assert (spend.total.input, spend.total.output) == (7 * MILLION, MILLION)
    assert spend.by_price == {"anthropic/claude": pytest.approx(33.6)}
    assert list(spend.days.values()) == [spend.total]


async def test_counts_of_any_size_are_counted(scene: Scene) -> None:
    huge = Usage(input=2**63 - 1, output=2**63 - 1, cache_read=2**63 - 1)
    for run in ("r1", "r2"):
        writer = await scene.started(run)
        await writer.write(reported(huge, model="claude-opus"), (Completed, {**END, "usage": huge}))
    spend = await scene.counted(runs=2)
    assert spend.total.cost >= 1_000_000
    assert spend.reserved == 0


async def test_a_run_that_cannot_be_counted_holds_up_no_other(scene: Scene) -> None:
    usage = Usage(input=MILLION, output=MILLION)
    await scene.server.client.set(scene.keys.gateway_counted("alien"), "another program's", ex=600)
    for run in ("alien", "r1"):
        writer = await scene.started(run)
        await writer.write(reported(usage, model="claude-opus"), (Completed, {**END, "usage": usage}))
    assert (await scene.counted(runs=1)).total.cost == pytest.approx(3 + 15)


async def test_the_longest_matching_price_applies_and_the_answering_model_precedes_the_requested_one(
    scene: Scene,
) -> None:
    usage = Usage(input=MILLION)
    run = await scene.started("r1")
    await run.write(reported(usage, model="claude-haiku-4-5"), (Completed, {**END, "usage": usage}))
    assert (await scene.counted(runs=1)).by_price == {"anthropic/claude-haiku": 1.0}


async def test_each_turn_is_counted_at_the_price_of_its_provider_and_a_failed_attempt_too(scene: Scene) -> None:
    run = await scene.started("r1", fallback=[{"provider": "other", "model": "gpt"}])
    first, both = Usage(input=MILLION, output=0), Usage(input=MILLION, output=MILLION)
    last = Usage(input=MILLION, output=MILLION + 10)
    await run.write(
        reported(first, provider="anthropic"),
        reported(Usage(output=MILLION), both, provider="other"),
        (Completed, {**END, "usage": last, "provider": "other"}),
    )
    spend = await scene.counted(runs=1)
    assert spend.by_price == {"other/": pytest.approx(100.001), "anthropic/claude": 3.0}


async def test_a_client_that_disconnects_early_pays_for_the_text_that_it_received(scene: Scene) -> None:
    run = await scene.started("r1")
    request = Generate(provider="anthropic", model="claude-opus", messages=[Message(role="user", content="x" * 400)])
    await scene.server.client.hset(scene.keys.run("r1"), "request", msgspec.json.encode(request))
    await run.say("a" * 4000, "b" * 3)
    await run.write((Cancelled, END))
    spend = await scene.counted(runs=1)
    assert (spend.total.input, spend.total.output) == (100, 1001)


async def test_a_cut_run_pays_what_was_reported_if_that_is_more_than_its_text(scene: Scene) -> None:
    run = await scene.started("r1")
    await run.say("a" * 8)
    await run.write((Incomplete, {**END, "reason": "stream_cut", "usage": Usage(input=50, output=500)}))
    spend = await scene.counted(runs=1)
    assert (spend.total.input, spend.total.output) == (50, 500)


async def test_a_failed_run_without_output_costs_only_the_reported_tokens(scene: Scene) -> None:
    await (await scene.started("r1")).write((RunFailedEvent, {**END, "error": BUSY}))
    await (await scene.started("r2")).write((RunFailedEvent, {**END, "error": BUSY, "usage": Usage(input=MILLION)}))
    spend = await scene.counted(runs=2)
    assert spend.total.cost == 3.0


async def test_runs_without_a_key_count_for_no_key(scene: Scene) -> None:
    other = await scene.started("r1", metadata={"gateway": {"key": None}})
    await other.write((Completed, {**END, "usage": Usage(input=MILLION)}))
    plain = await scene.started("r2", metadata=None)
    await plain.write((Completed, {**END, "usage": Usage(input=MILLION)}))
    ours = await scene.started("r3")
    await ours.write((Completed, END))
    assert (await scene.counted(runs=1)).total.cost == 0
    assert [key async for key in scene.server.client.scan_iter(match=f"{scene.keys.prefix}:{{gateway}}:spend:*")] == [
        scene.keys.gateway_spend("ada").encode()
    ]


async def test_a_gateway_that_missed_the_beginning_reads_it_from_the_log(scene: Scene) -> None:
    run = await scene.started("r1")
    async with scene.counting():
        await run.write(reported(Usage(input=MILLION)))
        await eventually(lambda: scene.spent_at_least(3.0))
    scene.counter = counter(scene.server, scene.bus, scene.keys)
    await run.write((Completed, {**END, "usage": Usage(input=2 * MILLION)}))
    assert (await scene.counted(runs=1)).total.cost == 6.0


async def test_spend_that_is_lost_with_a_runs_log_is_logged_once_and_its_reservation_is_released(
    scene: Scene,
) -> None:
    reserved = Reservation(client="ada", estimate_nano=70, hold_ms=600_000, keep_ms=600_000)
    hold = HoldKeys(scene.keys.gateway_counted("r1"), scene.keys.gateway_held("ada"))
    use, spend = scene.keys.gateway_use("ada"), scene.keys.gateway_spend("ada")
    limits = AdmissionLimits(budget_nano=100)
    call = admit(use, spend, "r1", limits, gateway="g", lease_ms=1000, hold=hold, reserved=reserved)
    await run_script(scene.server, call)
    assert (await scene.spend()).reserved == pytest.approx(70 / NANO)
    failures: list[str] = []
    scene.counter._failed_work = failures.append  # pyright: ignore[reportPrivateUsage]
    with capture_logs() as logged:
        for seq in (4, 5):
            end = Completed(run="r1", seq=seq, turn=1, attempt=1, **END, usage=Usage(input=MILLION))
            await scene.counter.count(end)
    assert failures == ["spend of a run without a log"]
    assert [(line["run"], line["log_level"]) for line in logged if line["event"] == "spend_lost"] == [("r1", "error")]
    assert (await scene.spend()).reserved == 0


async def test_killed_counters_neither_count_twice_nor_skip_anything(scene: Scene) -> None:
    runs = 400
    for n in range(runs):
        run = await scene.started(f"r{n}")
        await run.write(
            reported(Usage(output=7)),
            reported(Usage(output=6), Usage(output=13)),
            (Completed, {**END, "usage": Usage(output=13)}),
        )
    seen = 0
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.services.gateway.budgets.counting",
            scene.server.url.safe,
            scene.keys.prefix,
            str(scene.keys.partitions),
        )

        try:
            await eventually(partial(scene.wrote_more_than, seen))
        finally:
            process.kill()
            await process.wait()
        seen = (await scene.spend()).total.output
    spend = await scene.counted(runs=runs)
    assert (spend.total.runs, spend.total.output) == (runs, 13 * runs)
    assert round(spend.total.cost * NANO) == 13 * runs * 15_000

"""How deliveries of the bus runtime become messages of FastStream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ConnectionError as ConnectionLost

from tests.waiting import eventually
from tokenbus.bus.liveness import MAX_DEFECTS, Liveness, LongTask
from tokenbus_services.runtime.app import faststream_source as source_module
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import make_broker
from tokenbus_services.settings import Settings

Script = list[str | Exception | None]
"""The results of successive reads; later reads wait."""


class Source:
    """Deliveries to read, and what became of them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.handled: list[str] = []
        self.registry = CollectorRegistry()

    async def read(self) -> str | None:
        if not self.script:
            await asyncio.Event().wait()
        given = self.script.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    async def handle(self, delivery: str) -> None:
        if delivery == "bad":
            raise ValueError(delivery)
        self.handled.append(delivery)

    @property
    def messages(self) -> float:
        """How many messages FastStream counted."""
        families = [f for f in self.registry.collect() if f.name == "faststream_received_messages"]
        return sum(s.value for f in families for s in f.samples if s.name.endswith("_total"))


@asynccontextmanager
async def served(
    server_url: str, source: Source, *, stretch_s: float, liveness: Liveness | None = None
) -> AsyncGenerator[None]:
    broker = make_broker(Settings(redis_url=server_url), source.registry)
    attach(
        broker,
        stream="s",
        title="t",
        description="d",
        read=source.read,
        handle=source.handle,
        liveness=liveness or Liveness(),
        stretch_s=stretch_s,
    )
    await broker.start()
    try:
        yield
    finally:
        await broker.stop()


def handled(source: Source, *deliveries: str) -> Callable[[], Awaitable[bool]]:
    async def so() -> bool:
        return source.handled == list(deliveries)

    return so


async def test_each_delivery_is_a_message_of_its_own(server_url: str) -> None:
    source = Source(["a", "b", None, "c"])
    async with served(server_url, source, stretch_s=0):
        await eventually(handled(source, "a", "b", "c"))
        assert source.messages == 3


async def test_deliveries_that_follow_at_once_are_one_message(server_url: str) -> None:
    source = Source(["a", "b", None, "c"])
    async with served(server_url, source, stretch_s=60):
        await eventually(handled(source, "a", "b", "c"))
        assert source.messages == 2


async def test_a_failed_read_ends_a_stretch_and_nothing_else(server_url: str) -> None:
    source = Source(["a", ConnectionLost("gone"), ConnectionLost("still gone"), "b"])
    async with served(server_url, source, stretch_s=60):
        await eventually(handled(source, "a", "b"))
        assert source.messages == 2


async def test_a_delivery_that_cannot_be_handled_does_not_stop_those_after_it(server_url: str) -> None:
    source = Source(["bad", "a"])
    async with served(server_url, source, stretch_s=60):
        await eventually(handled(source, "a"))


async def test_a_stretch_that_waits_for_more_does_not_hold_up_the_stop(server_url: str) -> None:
    source = Source(["a"])
    async with asyncio.timeout(5):  # FastStream gives a message 15 s
        async with served(server_url, source, stretch_s=60):
            await eventually(handled(source, "a"))


@pytest.mark.parametrize("scheme", ["valkey", "redis", "valkeys"])
async def test_the_broker_takes_the_servers_address_as_it_is(scheme: str) -> None:
    broker = make_broker(Settings(redis_url=f"{scheme}://user:valkey@h:1"), CollectorRegistry())
    client = await broker.connect()
    found = client.connection_pool.connection_kwargs
    assert (found["host"], found["port"], found["username"]) == ("h", 1, "user")
    assert found["password"] == "valkey"
    await broker.stop()


async def test_the_delay_between_failed_reads_stays_below_half_a_second(
    server_url: str, monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def take_note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    with monkeypatch.context() as patched:
        source = Source([*(ConnectionLost("away") for _ in range(12)), "first"])
        patched.setattr(source_module.asyncio, "sleep", take_note)
        async with served(server_url, source, stretch_s=0):
            while not source.handled:
                await sleep(0)
    assert max(pauses) == source_module.LONGEST_PAUSE_S <= 0.5


async def test_it_may_be_stopped_while_it_pauses_after_a_read_that_failed(server_url: str):
    source = Source([ConnectionLost("away")] * 1000)
    async with served(server_url, source, stretch_s=0):
        await eventually(lambda: len(source.script) < 998)


async def test_a_handler_that_only_fails_ends_its_subscriber_and_so_the_worker(server_url: str):
    source = Source([])
    liveness = Liveness()
    ended: list[LongTask] = []
    failures: list[str] = []
    liveness.ended, liveness.failed_work = ended.append, failures.append
    for stretch_s in (0, 60):
        source.script += ["a", *["bad"] * (MAX_DEFECTS - 1), "b", *["bad"] * MAX_DEFECTS]
        source.handled.clear()
        ended.clear()
        failures.clear()
        async with served(server_url, source, stretch_s=stretch_s, liveness=liveness):
            await eventually(lambda: bool(ended))
        assert isinstance(ended[0].task.exception(), ValueError)
        assert source.handled == ["a", "b"]
        assert failures == ["subscriber t"] * (2 * MAX_DEFECTS - 1)

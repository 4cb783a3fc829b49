"""A fetcher as a whole: it accepts requests, stops an attempt that was cancelled, and hands over one that waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.events.frames import Control, TurnWork, encode
from tokenbus_services.fetcher.app import fetcher
from tokenbus_services.fetcher.service import FetcherService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import ProviderSettings, Settings, StageSettings

RUN = "r1"


@asynccontextmanager
async def opened(server_url: str, keys: Keys) -> AsyncGenerator[FetcherService]:
    """A fetcher without its HTTP pages; the test reads its queues."""
    settings = Settings(
        redis_url=server_url,
        prefix=keys.prefix,
        partitions=keys.partitions,
        providers={"anthropic": ProviderSettings(api="anthropic", api_key_env="")},
        stages=StageSettings(drain_s=0.01),
    )
    service = fetcher(WorkerCore(settings, "fetcher"))
    await service.open()
    try:
        yield service
    finally:
        await service.close()


async def publish(server: Server, keys: Keys) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    request = {"type": "generate", "id": RUN, "provider": "anthropic", "model": "m", "messages": messages}
    await server.client.xadd(keys.requests, {"__data__": json.dumps(request)})


async def hand_out(server: Server, keys: Keys) -> str:
    """An attempt that may not begin for an hour, as the parser hands it out; its stream."""
    stream = keys.topic(keys.partition_of(RUN), "turns")
    work = TurnWork(RUN, 0, 1, server.clock.now_ms() + 3_600_000)
    await server.client.xadd(stream, {RUN: encode(work)})
    return stream


async def finished(server: Server, stream: str) -> bool:
    return await server.client.xlen(stream) == 0


async def first_turn(service: FetcherService) -> QueueItem:
    items: list[QueueItem] = []
    while not items:
        items = await service.read_turns()
    [item] = items
    return item


async def test_a_request_becomes_an_open_run_and_leaves_the_inbound_stream(
    server: Server, server_url: str, keys: Keys
) -> None:
    async with opened(server_url, keys) as service:
        await eventually(lambda: service.ready)
        await publish(server, keys)
        items: list[QueueItem] = []
        while not items:
            items = await service.read_requests()
        await service.accept_requests(items)
        assert await server.client.hget(keys.run(RUN), "status") == b"open"
        assert await server.client.xlen(keys.requests) == 0


async def test_a_cancel_on_control_ends_an_attempt_that_waits(server: Server, server_url: str, keys: Keys) -> None:
    async with opened(server_url, keys) as service:
        stream = await hand_out(server, keys)
        await service.start_turns([await first_turn(service)])
        control = keys.topic(keys.partition_of(RUN), "control")
        await server.client.xadd(control, {RUN: encode(Control(RUN))})
        await server.client.pexpire(control, 60_000)
        await eventually(lambda: finished(server, stream))


@pytest.mark.parametrize("late_s", [0.0, 0.3])
async def test_an_attempt_that_waits_when_its_fetcher_stops_is_new_to_the_next_one(
    server: Server, server_url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Also if the fetcher stops before the server has answered that the attempt waits."""
    mark = WorkQueue.mark

    async def late(queue: WorkQueue, item: QueueItem, *, begun: bool) -> bool:
        await asyncio.sleep(late_s)
        return await mark(queue, item, begun=begun)

    await hand_out(server, keys)
    with monkeypatch.context() as patch:
        patch.setattr(WorkQueue, "mark", late)
        async with opened(server_url, keys) as stopped:
            await stopped.start_turns([await first_turn(stopped)])
    async with opened(server_url, keys) as service:
        item = await first_turn(service)
        assert item.deliveries == 1, "it had not begun, so it is not lost"
        begun = QueueItem(item.stream, item.entry_id, item.fields, deliveries=2, begun=True)
        await service.start_turns([begun])  # a fetcher closes an attempt that another one had begun
        await eventually(lambda: finished(server, item.stream))

"""A call whose first worker died: it runs again only if its result has not arrived."""

from __future__ import annotations

from typing import Any

import pytest

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import call_field
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import ToolWork, encode
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings
from tokenbus_services.tools.executor import ToolCall, ToolExecutor, ToolOutcome
from tokenbus_services.tools.service import CallMetrics, ToolService

RUN = "run-1"
DONE, OPEN, OLD = 1, 2, 3
"""Blocks: one whose result is in, one that waits for it, one of an attempt that is over."""


@pytest.mark.usefixtures("blobs")
async def test_a_call_that_was_delivered_before_is_run_only_if_it_is_still_open(
    server: Server, server_url: str, keys: Keys, run: Any, monkeypatch: pytest.MonkeyPatch
):
    executor: ToolExecutor = run("greet")
    ran: list[int] = []

    async def execute(call: ToolCall, progress: object, hold: object, task: object) -> ToolOutcome:
        ran.append(call.block)
        return ToolOutcome("done")

    monkeypatch.setattr(executor, "execute", execute)
    await server.client.hset(keys.run(RUN), mapping={"status": "open", call_field(OPEN): 2, call_field(OLD): 2})
    await server.client.pexpire(keys.run(RUN), 60_000)
    stream = keys.topic(keys.partition_of(RUN), "tools")
    await server.client.xgroup_create(stream, ToolService.name, id="0", mkstream=True)
    for block, attempt in ((DONE, 2), (OPEN, 2), (OLD, 1)):
        work = ToolWork(RUN, 0, attempt, block, "call", "greet", "{}")
        await server.client.xadd(stream, {RUN: encode(work)})
    [(_, entries)] = await server.client.xreadgroup(ToolService.name, "dead", {stream: ">"})
    ids = [entry_id for entry_id, _ in entries]
    await server.client.xclaim(stream, ToolService.name, "dead", 0, ids, idle=60_000, retrycount=1, justid=True)
    settings = Settings(redis_url=server_url, prefix=keys.prefix, partitions=keys.partitions)
    service = ToolService(core := WorkerCore(settings, "tools"), executor, CallMetrics(core.registry))
    await service.open()
    try:
        for _ in ids:
            await service.start(await service.read())

        async def finished() -> bool:
            return not await server.client.xlen(stream)

        await eventually(finished)
        assert ran == [OPEN]
    finally:
        await service.close()
        await server.client.xgroup_delconsumer(stream, ToolService.name, "dead")

"""Tenants take turns at the tool executors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import call_field
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import ToolWork, encode
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.limits import LimitSettings
from tokenbus_services.tools.executor import ToolCall, ToolExecutor, ToolOutcome
from tokenbus_services.tools.service import CallMetrics, ToolService

FLOOD = 1_000


@pytest.mark.usefixtures("blobs")
async def test_a_tenants_first_call_runs_while_another_tenants_thousand_wait(
    server: Server, server_url: str, keys: Keys, run: Any, monkeypatch: pytest.MonkeyPatch
):
    executor: ToolExecutor = run("greet")
    ran: list[str] = []

    async def execute(call: ToolCall, *_: object) -> ToolOutcome:
        ran.append(call.run)
        return ToolOutcome("done")

    monkeypatch.setattr(executor, "execute", execute)
    stream = keys.topic(0, "tools")
    await server.client.xgroup_create(stream, ToolService.name, id="0", mkstream=True)
    runs = [f"run-{n}" for n in range(FLOOD * keys.partitions * 2) if keys.partition_of(f"run-{n}") == 0][: FLOOD + 1]
    pipe = server.client.pipeline(transaction=False)
    for name in runs:
        pipe.hset(keys.run(name), mapping={"status": "open", call_field(0): 1})
        pipe.pexpire(keys.run(name), 60_000)
        tenant = "small" if name == runs[-1] else "big"
        pipe.xadd(stream, {name: encode(ToolWork(name, 0, 1, 0, "call", "greet", "{}", tenant=tenant))})
    await pipe.execute()
    limits = LimitSettings(tool_calls_per_worker=4)
    settings = Settings(redis_url=server_url, prefix=keys.prefix, partitions=keys.partitions, limits=limits)
    service = ToolService(core := WorkerCore(settings, "tools"), executor, CallMetrics(core.registry))
    await service.open()

    async def work() -> None:
        while True:
            await service.start(await service.read())

    working = asyncio.create_task(work())
    try:

        async def finished() -> bool:
            return not await server.client.xlen(stream)

        await eventually(finished, timeout=120)
        assert sorted(ran) == sorted(runs)
        assert ran.index(runs[-1]) < 20
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await service.close()

"""`/ready` says whether a worker can work: its service, its tasks, and the subscribers that FastStream starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tokenbus.bus.liveness import Liveness, stop_task
from tokenbus_services.runtime.app.service_app import WorkerApp, make_app, make_broker
from tokenbus_services.runtime.supervision import WorkerStuck
from tokenbus_services.settings import Settings

SUBSCRIBER = "subscriber of the test"


class StandIn:
    name = "test"

    def __init__(self) -> None:
        self.liveness = Liveness()
        self.liveness.expected.add(SUBSCRIBER)  # as its source does when the app is made
        self.ready = True

    async def open(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def service() -> StandIn:
    return StandIn()


@pytest.fixture
def app(service: StandIn) -> WorkerApp:
    registry = CollectorRegistry()
    broker = make_broker(Settings(redis_url="redis://127.0.0.1:1"), registry)
    return cast(WorkerApp, make_app(service, broker, registry, stuck_s=6.0))


@pytest.fixture
async def http(app: WorkerApp) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://worker") as client:
        yield client


async def status(http: httpx.AsyncClient) -> int:
    return (await http.get("/ready")).status_code


async def subscribe(service: StandIn) -> asyncio.Task[None]:
    """A subscriber that runs."""

    async def consume() -> None:
        service.liveness.enter(SUBSCRIBER)
        await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    return task


async def test_a_worker_is_ready_only_while_its_subscribers_run(http: httpx.AsyncClient, service: StandIn) -> None:
    assert await status(http) == 503
    subscriber = await subscribe(service)
    assert await status(http) == 200
    service.ready = False
    assert await status(http) == 503
    service.ready = True
    await stop_task(subscriber)
    assert await status(http) == 503
    assert (await http.get("/health")).status_code == 200, "the process is alive all the same"


async def test_a_worker_that_cannot_continue_is_not_ready(
    app: WorkerApp, http: httpx.AsyncClient, service: StandIn
) -> None:
    subscriber = await subscribe(service)
    app.supervisor.error = WorkerStuck("leases", "ended")
    assert await status(http) == 503
    await stop_task(subscriber)

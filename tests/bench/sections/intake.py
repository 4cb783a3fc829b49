"""Fairness at intake: a cancel behind 8,000 waiting requests, and a tenant's first run behind 15,000 requests of
another; and the cost of a request for intake and the server, alone and in a flood.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import msgspec

from tests.bench.figures import Figure
from tests.bench.procs import cpu_s
from tests.bench.stack import Stack, running
from tests.waiting import eventually
from tokenbus.bus.keys import Keys, order_keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn
from tokenbus_services.mock_provider.request_log import Exchange
from tokenbus_services.process.embedded_server import free_port

CANCELLED = 64
BEFORE_CANCELS = 8_000
BEFORE_FIRST = 15_000
FIRSTS = 8
"""Number of tenants, one after the other behind the flood."""
FEW, FLOOD = 1_500, 15_000
AT_ONCE = 10
"""Number of requests that the light load publishes at once; so few that none waits long enough for the fair queue."""
TAKEN_S = 300.0
MOST_CANCEL_MS = 200.0
MOST_FIRST_MS = 1_000.0
BETWEEN_S = 0.1
KEYS = Keys()
_ENDLESS = Script(name="endless", turns=(Turn(says=Reply(text="word " * 3_000), delivery=Delivery(pace=5)),))
_QUICK = Script(name="quick", turns=(Turn(says=Reply(text="done")),))


def taken_in() -> list[Figure]:
    """Start the services, put the floods on the inbound stream, and read the times from the provider."""
    port = free_port()
    table = f'[providers.held]\napi = "anthropic"\nbase_url = "http://127.0.0.1:{port}"\napi_key_env = ""\n'
    with running([], settings=table) as stack:
        redis_port: int = stack.client.connection_pool.connection_kwargs["port"]
        cancels, firsts = asyncio.run(_measure(f"redis://127.0.0.1:{redis_port}", port))
    cancels.sort()
    p50, p99 = (cancels[int(share * len(cancels))] for share in (0.5, 0.99))
    behind, first = f"behind {BEFORE_CANCELS:,} requests", max(firsts)
    return [
        Figure(name=f"cancel to the provider's socket p50, {behind}", unit="ms", value=p50),
        Figure(
            name=f"cancel to the provider's socket p99, {behind}",
            unit="ms",
            value=p99,
            aim=f"≤ {MOST_CANCEL_MS:g} ms",
            met=p99 <= MOST_CANCEL_MS,
        ),
        Figure(
            name=f"first call of a tenant, the slowest of {FIRSTS}, behind {BEFORE_FIRST:,} of another's",
            unit="ms",
            value=first,
            aim=f"≤ {MOST_FIRST_MS:g} ms",
            met=first <= MOST_FIRST_MS,
        ),
    ]


def intake_costs() -> list[Figure]:
    """CPU of intake and of the server per request: for a flood in which all requests wait, and for a few at once.

    The only run that the fetcher accepts never ends, so only intake works.
    """
    port = free_port()
    table = f'[providers.held]\napi = "anthropic"\nbase_url = "http://127.0.0.1:{port}"\napi_key_env = ""\n'
    with running([], settings=table, services=("fetcher",), runs_at_once=1) as stack:
        redis_port: int = stack.client.connection_pool.connection_kwargs["port"]
        few, flood = asyncio.run(_costs(stack, f"redis://127.0.0.1:{redis_port}", port))
    return [
        Figure(
            name=f"{what} CPU a request, {FLOOD:,} at once (bare: {AT_ONCE} at once)",
            unit="µs",
            value=flood[process],
            bare=few[process],
            ratio=flood[process] / few[process],
        )
        for what, process in (("intake's", "fetcher"), ("the server's", "server"))
    ]


async def _costs(stack: Stack, url: str, port: int) -> tuple[dict[str, float], dict[str, float]]:
    async with Server(url) as server, MockProvider([_ENDLESS, _QUICK], port=port) as provider:
        await _put(server, _generate(f"bench-{uuid4().hex}", "endless", "listener"))
        await provider.requested()
        await _taken(stack, server, AT_ONCE, AT_ONCE)  # warm
        few = await _taken(stack, server, FEW, AT_ONCE)
        flood = await _taken(stack, server, FLOOD, FLOOD)
    return few, flood


async def _taken(stack: Stack, server: Server, requests: int, at_once: int) -> dict[str, float]:
    """Microseconds per request by process, until intake has accepted all of them."""

    async def none_left() -> bool:
        return not await server.client.xlen(KEYS.requests)

    before = {name: cpu_s(stack.pids[name]) for name in ("fetcher", "server")}
    for _ in range(0, requests, at_once):
        await _flood(server, at_once)
        await eventually(none_left, timeout=TAKEN_S)
    return {name: (cpu_s(stack.pids[name]) - cpu) * 1e6 / requests for name, cpu in before.items()}


async def _measure(url: str, port: int) -> tuple[list[float], list[float]]:
    async with Server(url) as server, MockProvider([_ENDLESS, _QUICK], port=port) as provider:
        cancels = await _cancels(server, provider)
        await server.client.delete(KEYS.requests, *order_keys(KEYS.requests))  # the rest of the flood
        firsts = await _firsts(server, provider)
        await server.client.delete(KEYS.requests, *order_keys(KEYS.requests))
    return cancels, firsts


async def _cancels(server: Server, provider: MockProvider) -> list[float]:
    runs = [f"bench-{uuid4().hex}" for _ in range(CANCELLED)]
    await _put(server, *(_generate(run, "endless", "listener") for run in runs))
    await provider.until(lambda: sum(bool(e.reads_sent) for e in provider.requests if not e.ended) >= CANCELLED)
    exchanges = {e.request.user_text: e for e in provider.requests if e.request}
    await _flood(server, BEFORE_CANCELS)
    times: list[float] = []
    for run in runs:
        began = time.monotonic()
        await _put(server, {"type": "cancel", "run": run})
        times.append((await provider.disconnected(exchanges[run]) - began) * 1000)
        await asyncio.sleep(BETWEEN_S)
    return times


async def _firsts(server: Server, provider: MockProvider) -> list[float]:
    await _flood(server, BEFORE_FIRST)
    times: list[float] = []
    for _ in range(FIRSTS):
        run = f"bench-{uuid4().hex}"
        began = time.monotonic()
        await _put(server, _generate(run, "quick", run))
        called: list[Exchange] = []

        def has_called(run: str = run, called: list[Exchange] = called) -> bool:
            called[:] = [e for e in provider.requests if e.request and e.request.user_text == run]
            return bool(called)

        await provider.until(has_called)
        times.append((called[0].received_at - began) * 1000)
        await asyncio.sleep(BETWEEN_S)
    return times


async def _flood(server: Server, requests: int) -> None:
    await _put(server, *(_generate(f"flood-{uuid4().hex}", "quick", "flood") for _ in range(requests)))


def _generate(run: str, model: str, tenant: str) -> dict[str, object]:
    messages = [{"role": "user", "content": run}]
    request = {"type": "generate", "id": run, "provider": "held", "model": model, "messages": messages}
    return {**request, "metadata": {"tenant": tenant}}


async def _put(server: Server, *requests: dict[str, Any]) -> None:
    """Publish as any plain client does."""
    pipe: Any = server.client.pipeline(transaction=False)
    for request in requests:
        pipe.xadd(KEYS.requests, {"__data__": msgspec.json.encode(request)})
    await pipe.execute()

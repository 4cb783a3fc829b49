"""The gateway: its cost beyond a plain subscriber of the same runs, and other gateways in front of the same provider.

The bare column is the plain subscriber; for the first chunk of others, it is a client that calls the provider directly.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import redis.asyncio
import uvloop

from tests.bench import foreign, http_clients, subscriber
from tests.bench.figures import ROUNDS, WARM, Figure
from tests.bench.http_clients import Door
from tests.bench.jobs import Listen, Load, Received
from tests.bench.procs import cpu_s, resident_kb
from tests.bench.stack import PROVIDER, SERVICES, Stack, running
from tokenbus.client.publishing import new_run_id
from tokenbus.events.public import Started

GATEWAY = "gateway"
FIRST = Load(1, 1)
PACED = Load(16, 300, 50)
FULL = Load(64, 800)
FEW = Load(64, 100)
"""The same for the others, of which one needs a hundred times as long per chunk."""
FIRSTS, FEWEST = 40, 5
"""Number of requests, and of rounds at least, for the time to the first chunk."""
AT_ONCE = (1, 4, 16, 64)
"""So many of them at a time."""
IDLE = 2_000
"""Number of open streams without events."""
MOST_ADDED_MS, MOST_CHUNK_US, MOST_IDLE_KB = 1.5, 60.0, 25.0
LATENCY = "added latency p50, 16 clients of 50 chunks/s"


class _Sample(msgspec.Struct, frozen=True):
    cpu_us: float
    """CPU of the server that the clients use, per chunk."""
    beside_us: float
    """CPU of the plain subscriber, per chunk; 0 if there is none."""
    added_ms: float
    """Median time from the subscriber's chunk to the same chunk at the client; without a subscriber, from the
    provider's.
    """
    latency_ms: float
    """Median time from the provider's chunk to the client's."""
    per_second: float


def measured_gateway() -> list[Figure]:
    """The gateway; each of the others that is installed; then idle streams."""
    loads = [WARM, FIRST, PACED, FULL, FEW]
    with running(loads, services=(*SERVICES, GATEWAY), settings="[gateway]\nconnections = 4096\n") as stack:
        door = Door(f"{stack.urls[GATEWAY]}/v1")
        _with_subscriber(stack, door, WARM)
        figures = _first_chunk(stack, door)
        samples = {load: [_with_subscriber(stack, door, load) for _ in range(ROUNDS)] for load in (PACED, FULL)}
        figures += _streams(samples)
        provider = stack.urls["provider"]
        for gateway in foreign.GATEWAYS:
            with foreign.running(gateway, provider, [load.name for load in loads]) as other:
                try:
                    figures += _of_other(gateway.name, *other, provider=Door(f"{provider}/v1")) if other else []
                except (OSError, ValueError, AssertionError) as e:  # a time-out is an OSError
                    print(f"bench: {gateway.name}: {e!r}: left out", file=sys.stderr, flush=True)
        return figures + _idle(stack)


def _first_chunk(stack: Stack, door: Door) -> list[Figure]:
    """Time from a request to its first chunk, for several at once: through the gateway, and for programs that publish
    and read the topic. Both are durable.
    """

    async def both(at_once: int) -> tuple[list[float], list[float]]:
        port: int = stack.client.connection_pool.connection_kwargs["port"]
        async with redis.asyncio.Redis(port=port, protocol=2, max_connections=2 * at_once) as client:
            through, plain = list[float](), list[float]()
            for _ in range(max(FEWEST, FIRSTS // at_once)):
                plain += await asyncio.gather(*(_published_ms(client, stack) for _ in range(at_once)))
                through += await _firsts_ms(door, f"{PROVIDER}/{FIRST.name}", at_once)
            return through, plain

    figures: list[Figure] = []
    for at_once in AT_ONCE:
        through, plain = uvloop.run(both(at_once))
        name = f"gateway: request to first chunk p50, {at_once} at once (durable)"
        figures.append(Figure(name=name, unit="ms", value=median(through), bare=median(plain)))
        if at_once == 1:
            added = median(a - b for a, b in zip(through, plain, strict=True))
            figures.append(_aimed("  added by the gateway p50", "ms", added, MOST_ADDED_MS))
    return figures


async def _firsts_ms(door: Door, model: str, at_once: int) -> list[float]:
    return await asyncio.gather(*(http_clients.first_chunk_ms(door, model) for _ in range(at_once)))


async def _published_ms(client: redis.asyncio.Redis, stack: Stack) -> float:
    keys, run = stack.keys, new_run_id()
    stream = keys.topic(keys.partition_of(run), "visible")
    last = await client.xrevrange(stream, count=1)
    after: Any = last[0][0] if last else "0-0"
    messages = [{"role": "user", "content": "Hello."}]
    request = {"type": "generate", "id": run, "provider": PROVIDER, "model": FIRST.name, "messages": messages}
    began = time.monotonic_ns()
    await client.xadd(keys.requests, {"__data__": msgspec.json.encode(request)})
    while True:
        found: Any = await client.xread({stream: after}, block=30_000)
        assert found, "no chunk came"
        entries = found[0][1]
        if any(run.encode() in entry[b"__data__"] for _, entry in entries):
            return (time.monotonic_ns() - began) / 1e6
        after = entries[-1][0]


def _with_subscriber(stack: Stack, door: Door, load: Load) -> _Sample:
    """The load from clients of the gateway, while a plain subscriber reads the same chunks."""
    streams = [stack.keys.topic(p, "visible") for p in range(stack.keys.partitions)]
    stack.desk.give(subscriber.NAME, Listen(streams, load.total, load.timeout_s))
    stack.desk.answer(subscriber.NAME, bool, timeout_s=30)
    before = cpu_s(stack.pids[GATEWAY]), cpu_s(stack.pids[subscriber.NAME])
    received = answered(door, f"{PROVIDER}/{load.name}", load)
    beside = stack.desk.answer(subscriber.NAME, Received, load.timeout_s)
    after = cpu_s(stack.pids[GATEWAY]), cpu_s(stack.pids[subscriber.NAME])
    stack.client.delete(*streams)
    plain = dict(zip(array("q", beside.sent), array("q", beside.arrived), strict=True))
    chunks = load.total / 1e6
    return _sample(received, load, plain.get, (after[0] - before[0]) / chunks, (after[1] - before[1]) / chunks)


def _direct(pid: int, door: Door, model: str, load: Load) -> _Sample:
    """The load from clients of another proxy."""
    before = cpu_s(pid)
    received = answered(door, model, load)
    return _sample(received, load, lambda sent: sent, (cpu_s(pid) - before) * 1e6 / load.total, 0.0)


def answered(door: Door, model: str, load: Load) -> list[http_clients.Answer]:
    """The load as requests to the gateway, with one client per run."""
    return uvloop.run(
        http_clients.answers(
            door,
            model,
            clients=load.runs,
            stamps=load.chunks,
            stagger_s=load.stagger_s,
            timeout_s=load.timeout_s + 30,
        )
    )


def _sample(
    received: list[http_clients.Answer], load: Load, since: Callable[[int], int | None], cpu_us: float, beside_us: float
) -> _Sample:
    pairs = [(sent, there) for answer in received for sent, there in zip(answer.sent, answer.arrived, strict=True)]
    seconds = (max(there for _, there in pairs) - min(sent for sent, _ in pairs)) / 1e9
    return _Sample(
        cpu_us=cpu_us,
        beside_us=beside_us,
        added_ms=median(there - at for sent, there in pairs if (at := since(sent)) is not None) / 1e6,
        latency_ms=median(there - sent for sent, there in pairs) / 1e6,
        per_second=load.total / seconds,
    )


def _streams(samples: dict[Load, list[_Sample]]) -> list[Figure]:
    paced, full = samples[PACED], samples[FULL]
    return [
        _aimed(
            "gateway: added latency p50, 16 clients of 50 chunks/s",
            "ms",
            median(s.added_ms for s in paced),
            MOST_ADDED_MS,
        ),
        _cpu("gateway: CPU a chunk, 16 clients of 50 chunks/s", paced),
        _cpu("gateway: CPU a chunk, saturated, 64 clients", full, MOST_CHUNK_US),
        Figure(name="  chunks a second", unit="/s", value=median(s.per_second for s in full)),
    ]


def _cpu(name: str, samples: list[_Sample], most: float | None = None) -> Figure:
    value, bare = median(s.cpu_us for s in samples), median(s.beside_us for s in samples) or None
    aim, met = ("", None) if most is None else (f"≤ {most:g} µs", value <= most)
    return Figure(name=name, unit="µs", value=value, bare=bare, ratio=bare and value / bare, aim=aim, met=met)


def _aimed(name: str, unit: str, value: float, most: float) -> Figure:
    return Figure(name=name, unit=unit, value=value, aim=f"≤ {most:g} {unit}", met=value <= most)


# --- streams that are silent -------------------------------------------------------------------------------------


def _idle(stack: Stack) -> list[Figure]:
    """Memory of the gateway for each client that follows a run of its own without events."""
    pid = stack.pids[GATEWAY]
    urls = [f"{stack.urls[GATEWAY]}/runs/{run}/events" for run in _silent_runs(stack, IDLE)]

    async def hold() -> int:
        for answer in await http_clients.held(urls[:100]):  # excludes what the gateway loads once, for the first
            # streams
            answer.close()
        before = resident_kb(pid)
        open_ = await http_clients.held(urls)
        await asyncio.sleep(12)  # time for some keep-alives, and for checks whether the runs exist
        after = resident_kb(pid)
        for answer in open_:
            answer.close()
        return after - before

    return [
        _aimed(f"gateway: memory of an idle stream, {IDLE:,} of them", "KB", uvloop.run(hold()) / IDLE, MOST_IDLE_KB)
    ]


def _silent_runs(stack: Stack, count: int) -> list[str]:
    """Runs that have begun, and that no worker knows."""
    runs = [new_run_id() for _ in range(count)]
    with stack.client.pipeline(transaction=False) as pipe:
        for run in runs:
            began = Started(run=run, seq=0, turn=0, attempt=1, provider=PROVIDER, model="silent")
            pipe.xadd(stack.keys.log(run), {"__data__": msgspec.json.encode(began)}, id="1-0")
            pipe.hset(stack.keys.run(run), "status", "open")
        pipe.execute()
    return runs


# --- the gateways of others ----------------------------------------------------------------------------------------


def _of_other(name: str, pid: int, door: Door, provider: Door) -> list[Figure]:
    _direct(pid, door, WARM.name, WARM)

    async def both(at_once: int) -> tuple[list[float], list[float]]:
        through, plain = list[float](), list[float]()
        for _ in range(max(FEWEST, FIRSTS // at_once)):
            plain += await _firsts_ms(provider, FIRST.name, at_once)
            through += await _firsts_ms(door, FIRST.name, at_once)
        return through, plain

    firsts: list[Figure] = []
    for at_once in AT_ONCE:
        through, plain = uvloop.run(both(at_once))
        text = f"{name}: request to first chunk p50, {at_once} at once (not durable)"
        firsts.append(Figure(name=text, unit="ms", value=median(through), bare=median(plain)))
    paced = [_direct(pid, door, PACED.name, PACED) for _ in range(ROUNDS)]
    full = [_direct(pid, door, FEW.name, FEW) for _ in range(ROUNDS)]
    latency = median(s.added_ms for s in paced)
    return [
        *firsts,
        Figure(name=f"{name}: added latency p50, 16 clients of 50 chunks/s", unit="ms", value=latency),
        _cpu(f"{name}: CPU a chunk, 16 clients of 50 chunks/s", paced),
        _cpu(f"{name}: CPU a chunk, saturated, 64 clients", full),
        Figure(name="  chunks a second", unit="/s", value=median(s.per_second for s in full)),
    ]

"""Ten thousand slow open runs on one machine: memory of each, CPU per chunk and latency, in one process and in
three.
"""

from __future__ import annotations

import os
import re
import time
import urllib.request
from array import array
from collections.abc import Sequence
from statistics import mean
from typing import Any
from uuid import uuid4

import msgspec

from tests.bench import subscriber
from tests.bench.figures import WARM, Figure
from tests.bench.jobs import Listen, Load, Received
from tests.bench.measure import Meter
from tests.bench.procs import cpu_s, resident_kb
from tests.bench.stack import PIPELINE, PROVIDER, SERVICES, Stack, running, service_of

RUNS = int(os.environ.get("OPEN_RUNS", "10000"))
PACE = 0.5
CHUNKS = 250
"""A run lasts 500 s, so that a slow machine has time to open all runs."""
WINDOW_S = 20.0
"""The measurement begins when all runs stream."""
MOST_UNCALLED = 300
"""Number of runs that wait for their call at once. So a slow machine needs longer, and its memory holds no backlog."""
PROVIDERS = 2
"""Processes of the mock provider; a single one would be the slowest part."""
AIM_KB = 30.0
KEYS_SAMPLED = 200
_SLOW = Load(RUNS, CHUNKS, PACE)


def opened() -> list[Figure]:
    """Through one pipeline worker, then through one worker per stage."""
    figures: list[Figure] = []
    for way, services in (("chained", (PIPELINE,)), ("separate", SERVICES)):
        with running([WARM, _SLOW], services=services, runs_at_once=RUNS + 100, providers=PROVIDERS) as stack:
            Meter(stack).services(WARM)
            figures += _measured(stack, way)
    return figures


def _measured(stack: Stack, way: str) -> list[Figure]:
    topics = [stack.keys.topic(p, "visible") for p in range(stack.keys.partitions)]
    idle = _memory(stack)
    runs = _open(stack)
    stack.desk.give(subscriber.NAME, Listen(topics, _SLOW.total, timeout_s=WINDOW_S))
    stack.desk.answer(subscriber.NAME, bool, timeout_s=30)
    before = _cpu(stack)
    received = stack.desk.answer(subscriber.NAME, Received, 3 * WINDOW_S)
    after = _cpu(stack)
    held, keys, still = _memory(stack), _keys(stack, runs), _count(stack)
    if still < RUNS:
        raise TimeoutError(f"{RUNS - still:,} runs were over before the end; this machine is too slow or too busy")
    sent, arrived = array("q", received.sent), array("q", received.arrived)
    waits = sorted((there - here) / 1e6 for here, there in zip(sent, arrived, strict=True))
    return [
        *_memory_figures(way, idle, held, keys),
        *_cpu_figures(way, before, after, len(waits)),
        *_latency(way, waits),
    ]


def _open(stack: Stack) -> list[str]:
    """Publish the runs, and return them once all are called. Raises TimeoutError if the first ends before that."""
    runs = [f"bench-{uuid4().hex}" for _ in range(RUNS)]
    deadline = time.monotonic() + CHUNKS / PACE - 2 * WINDOW_S
    called = published = 0
    while (called := _called(stack)) < RUNS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {called:,} runs are called; this machine is too slow or too busy")
        for number in range(published, min(RUNS, called + MOST_UNCALLED)):
            _publish(stack, runs[number], number)
            published = number + 1
        time.sleep(0.1)
    time.sleep(2 / PACE)  # time for the connections and first chunks of the last runs
    return runs


def _publish(stack: Stack, run: str, number: int) -> None:
    request = {
        "type": "generate",
        "id": run,
        "provider": PROVIDER if number % PROVIDERS == 0 else f"{PROVIDER}-{number % PROVIDERS + 1}",
        "model": _SLOW.name,
        "messages": [{"role": "user", "content": f"Run {number}"}],
    }
    stack.client.xadd(stack.keys.requests, {"__data__": msgspec.json.encode(request)})


def _called(stack: Stack) -> int:
    """Open provider calls, from the fetcher's metrics."""
    [fetcher] = [url for name, url in stack.urls.items() if name in ("fetcher", PIPELINE)]
    with urllib.request.urlopen(f"{fetcher}/metrics", timeout=30) as response:
        found = re.search(rb"^tokenbus_attempts_running(?:\{.*\})? (\S+)", response.read(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def _count(stack: Stack) -> int:
    return sum(stack.client.zcard(stack.keys.open_runs(p)) for p in range(stack.keys.partitions))


def _cpu(stack: Stack) -> dict[str, float]:
    return {name: cpu_s(pid) for name, pid in stack.pids.items()}


def _memory(stack: Stack) -> dict[str, float]:
    """KB: each service's share of the machine's memory, and the server's reported memory."""
    info: dict[str, Any] = stack.client.info("memory")
    own = {
        name: float(resident_kb(pid)) for name, pid in stack.pids.items() if service_of(name) in (*SERVICES, PIPELINE)
    }
    return own | {"server": info["used_memory"] / 1024}


def _keys(stack: Stack, runs: Sequence[str]) -> float:
    """KB of a run's own keys on the server; the rest is shared streams, which have bounds of their own."""
    sampled = runs[:: len(runs) // KEYS_SAMPLED]
    keys = stack.keys
    of_run = [
        sum(stack.client.memory_usage(key, samples=0) or 0 for key in (keys.run(run), keys.log(run))) for run in sampled
    ]
    return mean(of_run) / 1024


def _memory_figures(way: str, idle: dict[str, float], held: dict[str, float], keys: float) -> list[Figure]:
    each = {name: (size - idle[name]) / RUNS for name, size in held.items()}
    streams = each.pop("server") - keys
    total = sum(each.values()) + keys
    figures = [
        Figure(name=f"memory of an open run, {name}, {way}", unit="KB", value=size)
        for name, size in (*each.items(), ("server, the run's own keys", keys))
    ]
    return [
        Figure(
            name=f"memory of an open run, {RUNS:,} of them, {way}",
            unit="KB",
            value=total,
            aim=f"≤ {AIM_KB:g} KB",
            met=total <= AIM_KB,
        ),
        *figures,
        Figure(name=f"  and the shared streams, {way}", unit="KB", value=streams),
    ]


def _cpu_figures(way: str, before: dict[str, float], after: dict[str, float], chunks: int) -> list[Figure]:
    names = [
        name for name in before if service_of(name) in (*SERVICES, PIPELINE, "server", subscriber.NAME, "provider")
    ]
    spent = {name: (after[name] - before[name]) for name in names}
    counted = sum(s for name, s in spent.items() if service_of(name) != "provider")
    return [
        Figure(name=f"chunks a second, {RUNS:,} open runs, {way}", unit="/s", value=chunks / WINDOW_S),
        Figure(name=f"CPU a chunk, {RUNS:,} open runs, {way}", unit="µs", value=counted * 1e6 / chunks),
        *(Figure(name=f"  {name}", unit="µs", value=s * 1e6 / chunks) for name, s in spent.items()),
    ]


def _latency(way: str, waits: Sequence[float]) -> list[Figure]:
    return [
        Figure(
            name=f"added latency p{share}, {RUNS:,} open runs, {way}", unit="ms", value=waits[len(waits) * share // 100]
        )
        for share in (50, 99)
    ]

"""How the services scale: more workers, more concurrent runs, and what a run leaves behind after its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.bench.figures import WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter, Sample
from tests.bench.stack import SERVICES, Stack, running
from tokenbus.bus.keys import PUBLIC_TOPICS
from tokenbus_services.mock_provider import STAMP, Reply, Script, Stall, Turn

WORKERS = (1, 2, 4)
LOADS = (Load(1, 4000), Load(10, 1000), Load(100, 200), Load(1000, 60))
"""From one run to a thousand at once, each as fast as possible, with enough chunks to measure."""

HELD = Load(1000, 21)
FINISHED = Load(500, 20)
FINISHED_ROUNDS = 6
RETENTION_S = 20
_MARK = "7"
"""The last word before the provider stalls."""
_OPEN = Script(
    turns=(
        Turn(says=Reply(text=f"{' '.join([STAMP] * 20)} {_MARK} 0 0"), fault=Stall(after_text=f" {_MARK}")),
    )
)  # fmt: skip


def scaled() -> list[Figure]:
    """Chunks a second and CPU per chunk, by workers per stage and concurrent runs."""
    figures: list[Figure] = []
    for workers in WORKERS:
        with running([WARM, *LOADS], workers=workers) as stack:
            meter = Meter(stack)
            meter.services(WARM)
            for load in LOADS:
                figures += _figures(workers, load, meter.services(load))
    return figures


def _figures(workers: int, load: Load, sample: Sample) -> list[Figure]:
    where = f"{workers} worker{'s' * (workers > 1)} a stage, {load.runs:,} run{'s' * (load.runs > 1)}"
    return [
        Figure(name=f"chunks a second, {where}", unit="/s", value=sample.per_second()),
        Figure(name="  CPU a chunk", unit="µs", value=sample.cpu_us()),
    ]


def remembered() -> list[Figure]:
    """Memory of an open run, and what a finished run leaves."""
    settings = f"[retention]\nfinished_run_s = {RETENTION_S}"
    with running([WARM, FINISHED], scripts={"open": _OPEN}, settings=settings) as stack:
        meter = Meter(stack)
        meter.services(WARM)
        meter.services(FINISHED)
        idle = _memory(stack)
        with meter.held(HELD, "open"):
            figures = [
                Figure(name=f"memory of an open run, {name}", unit="KB", value=(size - idle[name]) / HELD.runs / 1024)
                for name, size in _memory(stack).items()
            ]
        return figures + _left_behind(stack, meter)


def _left_behind(stack: Stack, meter: Meter) -> list[Figure]:
    """Memory without the topics, which have bounds of their own."""
    topics = [stack.keys.topic(p, topic) for p in range(stack.keys.partitions) for topic in PUBLIC_TOPICS]
    _expired(stack)
    stack.client.delete(*topics)
    before, keys = _memory(stack), stack.client.dbsize()
    for _ in range(FINISHED_ROUNDS):
        meter.services(FINISHED)
    _expired(stack)
    stack.client.delete(*topics)
    after, runs = _memory(stack), FINISHED_ROUNDS * FINISHED.runs
    figures = [
        Figure(name=f"memory that a finished run leaves, {name}", unit="B", value=(after[name] - size) / runs)
        for name, size in before.items()
    ]
    left = stack.client.dbsize() - keys
    return [*figures, Figure(name=f"keys that {runs:,} finished runs leave", unit="", value=left)]


def _expired(stack: Stack) -> None:
    """Wait until the last run's keys have expired. Raises TimeoutError."""
    deadline = time.monotonic() + 3 * RETENTION_S
    while any(stack.client.scan_iter(match=f"{stack.keys.prefix}:*:run:*", count=10_000)):
        if time.monotonic() > deadline:
            raise TimeoutError("keys of finished runs are still there")
        time.sleep(0.2)


def _memory(stack: Stack) -> dict[str, float]:
    """Bytes: resident memory of each service, and the server's own figure."""
    info: dict[str, Any] = stack.client.info("memory")
    return {name: _resident(stack.pids[name]) for name in SERVICES} | {"server": float(info["used_memory"])}


def _resident(pid: int) -> float:
    """Resident memory of a process in bytes (proc(5), VmRSS of status)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has ended")

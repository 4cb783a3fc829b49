"""The way of a chunk through a pipeline worker without HTTP and without other processes' CPU: from a read of the answer
to the server's reply, with the real stages, the real script and a real server.

CPU time is this thread's, so a busy machine affects it little. Calls, of Python and of C, hardly differ between runs:
they show what a change saves even on a loaded machine.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from statistics import median
from types import FrameType

import uvloop

from tests.bench.in_process.decode import reads_of
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import PUBLIC_TOPICS, Keys
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.chain import Chain
from tokenbus.bus.stage.stage import Stage, StageOptions
from tokenbus.events.frames import CONTROL_ATTEMPT, Accepted, Data, EventFrame, Opened, RunLimits, encode
from tokenbus.events.quirks import Quirks
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.fetcher.writing.raw_writer import RawWriter
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.parser.logic import ParserLogic
from tokenbus_services.process.embedded_server import EmbeddedServer

PARTITIONS, RUNS = 8, 16
ALONE, TOGETHER = 1, 16
"""Chunks of a flush: one, as at a low rate, and one of each run, in all partitions."""
FLUSHES, ROUNDS = 100, 9
_TTL_MS = 600_000


class Path(RawWriter):
    """The writer, with a way to wait until a flush is over."""

    def __init__(self, server: Server, keys: Keys) -> None:
        super().__init__(server, keys, linger_s=0.0, lag_bytes=2**26)
        self.flushed = asyncio.Event()

    async def _flush_all(self, attempts: Collection[AttemptWriter]) -> None:
        await super()._flush_all(attempts)
        self.flushed.set()


class Chunks:
    """Runs in the middle of a text block."""

    def __init__(self, path: Path, attempts: list[AttemptWriter], reads: list[bytes]) -> None:
        self._path = path
        self._attempts = attempts
        self._reads = reads
        self._at = 0

    async def flush(self, chunks: int) -> None:
        """Write this many chunks, each of another run, and wait until they are on the server."""
        written = [self._attempts[(self._at + n) % RUNS] for n in range(chunks)]
        self._at += chunks
        for attempt in written:
            attempt.write_item(Data(self._reads[self._at // RUNS % len(self._reads)]))
        while any(attempt.items for attempt in written):
            self._path.flushed.clear()
            await self._path.flushed.wait()


@asynccontextmanager
async def streaming() -> AsyncGenerator[Chunks]:
    """A server, both stages with all partitions, and runs that stream."""
    keys = Keys("path", PARTITIONS)
    with EmbeddedServer(binary=binary()) as embedded:
        async with Server(embedded.url) as server:
            lifetimes = RunLifetimes(_TTL_MS, _TTL_MS)
            first = Stage(server, keys, _options("normalizer"), lambda p: NormalizerLogic(p, keys))
            second = Stage(
                server,
                keys,
                _options("parser"),
                lambda p: ParserLogic(p, keys.within(p), topics=PUBLIC_TOPICS, lifetimes=lifetimes),
            )
            path = Path(server, keys)
            for opened in (second, first, path):
                await opened.open()
            try:
                await eventually(lambda: len(first.owned) == len(second.owned) == PARTITIONS)
                path.chain = Chain(server, keys, first, second)
                reads = reads_of("anthropic")
                begin = next(n for n, read in enumerate(reads) if b"content_block_delta" in read)
                attempts = [await _begun(server, path, f"run-{n}") for n in range(RUNS)]
                for attempt in attempts:
                    attempt.write_item(Data(b"".join(reads[: begin + 1])), urgent=True)
                await eventually(lambda: not any(attempt.items for attempt in attempts))
                yield Chunks(path, attempts, [read for read in reads if b"content_block_delta" in read])
            finally:
                for opened in (path, first, second):
                    await opened.close()


def _options(group: str) -> StageOptions:
    topic = "raw" if group == "normalizer" else "events"
    return StageOptions(group=group, topic=topic, worker="w", lease_s=30.0, tick_s=5.0)


async def _begun(server: Server, path: Path, run: str) -> AttemptWriter:
    keys, rules = path.keys, RunLimits()
    accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=rules, tools=[])
    await server.client.hset(keys.run(run), mapping={"status": "open", "attempt": 1, "raw": 0})
    events = keys.topic(keys.partition_of(run), "events")
    await server.client.xadd(events, {run: encode(EventFrame(0, CONTROL_ATTEMPT, 1, [accepted]))})
    attempt = path.attempt(run, 0, 1, lambda reason: None)
    headers = {"content-type": "text/event-stream"}
    opened = Opened(api="anthropic", status=200, headers=headers, stream=True, quirks=Quirks())
    attempt.write_item(opened, urgent=True)
    return attempt


def measured_path() -> list[tuple[str, str, float]]:
    """Name, unit and value: µs, calls and KB of a chunk, in a flush of its own and in one of sixteen."""
    return uvloop.run(_measured())


async def _measured() -> list[tuple[str, str, float]]:
    found: list[tuple[str, str, float]] = []
    async with streaming() as chunks:
        for size in (ALONE, TOGETHER):
            for _ in range(FLUSHES):
                await chunks.flush(size)  # warm
            times: list[float] = []
            for _ in range(ROUNDS):
                begun = time.thread_time()
                for _ in range(FLUSHES):
                    await chunks.flush(size)
                times.append((time.thread_time() - begun) * 1e6 / FLUSHES / size)
            what = "alone in its flush" if size == ALONE else f"{size} in a flush"
            found += [
                (f"CPU of a chunk in a pipeline worker, without HTTP, {what}", "µs", median(times)),
                (f"  calls of Python and C, {what}", "", await _calls(chunks, size) / FLUSHES / size),
                (f"  held at the most while it is written, {what}", "KB", await _held(chunks, size) / 1024 / size),
            ]
    return found


async def _calls(chunks: Chunks, size: int) -> int:
    counted = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(FLUSHES):
            await chunks.flush(size)
    finally:
        sys.setprofile(None)
    return counted


async def _held(chunks: Chunks, size: int) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        peaks: list[int] = []
        for _ in range(FLUSHES):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            await chunks.flush(size)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return median(peaks)
    finally:
        tracemalloc.stop()

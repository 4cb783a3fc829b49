"""The console: the cost of one open page for the gateway while 2,000 runs stream 5,000 chunks a second in all.

The bare column is the same gateway without a page. The console samples, so its cost should not depend on the number of
chunks. If Chromium is on the PATH, it shows the river at the same time, and the cost of a frame is measured.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

import msgspec

from tests.bench.figures import Figure
from tests.bench.frames import Frames, frames_of
from tests.bench.jobs import Load
from tests.bench.procs import cpu_s
from tests.bench.stack import PIPELINE, PROVIDER, Stack, running
from tests.console.browser import browser, page_of
from tokenbus.client.publishing import new_run_id

GATEWAY = "gateway"
RUNS = 2_000
SPEAKS = Load(RUNS, 400, 2.5)
"""Long enough for both measurements; the runs are cut off after these."""
WARM_S = 8.0
MEASURE_S = 10.0
START_S = 150.0
MOST_SHARE = 5.0
MOST_FRAME_MS = 16.0
SETTINGS = "[gateway]\n[console]\nroles_without_keys = ['see_runs', 'see_content']\n"


class _Sample(msgspec.Struct, frozen=True):
    share: float
    """CPU of the gateway, in percent of a core."""
    chunks: float
    """Chunks a second that the bus published."""


def watched() -> list[Figure]:
    """The gateway's share of a core without a page, with one, and with ten pages of three kinds."""
    with running([SPEAKS], services=(PIPELINE, GATEWAY), settings=SETTINGS, runs_at_once=RUNS) as stack:
        _publish(stack)
        _until_all_speak(stack)
        bare = _measured(stack)
        with _pages(stack, ["limit=200"]) as seen:
            time.sleep(WARM_S)
            one = _measured(stack)
        many_queries = ["limit=200", "limit=200&state=speaking", f"limit=200&provider={PROVIDER}"]
        frames = _drawn(stack)
        with _pages(stack, [many_queries[n % len(many_queries)] for n in range(10)]):
            time.sleep(2)
            many = _measured(stack)
    figures = [
        Figure(
            name=f"console: gateway's share of a core, one page, {RUNS:,} open runs",
            unit="%",
            value=one.share,
            bare=bare.share,
            aim=f"≤ {MOST_SHARE:g} %",
            met=one.share - bare.share <= MOST_SHARE,
        ),
        Figure(name="  ten pages of three views", unit="%", value=many.share, bare=bare.share),
        Figure(name="  chunks a second meanwhile", unit="/s", value=median((bare.chunks, one.chunks, many.chunks))),
        Figure(name="  open runs that the page counts", unit="", value=float(seen[-1]["open"])),
        Figure(
            name="  time of a sample",
            unit="ms",
            value=float(median(river["behind_ms"] for river in seen)),
        ),
    ]
    if frames:
        aim, met = f"≤ {MOST_FRAME_MS:g} ms", frames.p99 <= MOST_FRAME_MS
        figures += [
            Figure(name="  a frame of its page in Chromium, p99", unit="ms", value=frames.p99, aim=aim, met=met),
            Figure(name="  the longest frame", unit="ms", value=frames.longest),
        ]
    return figures


def _drawn(stack: Stack) -> Frames | None:
    """The cost of a frame for a page that shows the river; None without a browser."""
    if shutil.which("chromium") is None:
        return None

    async def measured() -> Frames:
        async with browser() as running_browser, page_of(running_browser) as page:
            await page.goto(f"{stack.urls[GATEWAY]}/console/")
            await page.wait_for_selector("[data-run]")
            await asyncio.sleep(WARM_S)
            return await frames_of(page, MEASURE_S)

    return asyncio.run(measured())


def _publish(stack: Stack) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    with stack.client.pipeline(transaction=False) as pipe:
        for _ in range(RUNS):
            request = {"id": new_run_id(), "provider": PROVIDER, "model": SPEAKS.name, "messages": messages}
            pipe.xadd(stack.keys.requests, {"__data__": msgspec.json.encode({"type": "generate", **request})})
        pipe.execute()


def _until_all_speak(stack: Stack) -> None:
    """Wait until all runs are open; if the machine is too slow for that, the open ones are measured."""
    deadline = time.monotonic() + START_S
    while sum(stack.client.zcard(stack.keys.open_runs(p)) for p in range(stack.keys.partitions)) < RUNS:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    time.sleep(WARM_S)


def _measured(stack: Stack) -> _Sample:
    pid = stack.pids[GATEWAY]
    began, cpu, chunks = time.monotonic(), cpu_s(pid), _published(stack)
    time.sleep(MEASURE_S)
    seconds = time.monotonic() - began
    return _Sample(share=100 * (cpu_s(pid) - cpu) / seconds, chunks=(_published(stack) - chunks) / seconds)


def _published(stack: Stack) -> int:
    topics = [stack.keys.topic(p, "chunks") for p in range(stack.keys.partitions)]
    return sum(stack.client.xinfo_stream(topic)["entries-added"] for topic in topics if stack.client.exists(topic))


@contextmanager
def _pages(stack: Stack, queries: list[str]) -> Generator[list[dict[str, Any]]]:
    """Pages that read as a browser does; returns what the first one received of the river."""
    seen: list[dict[str, Any]] = []
    stop = threading.Event()

    def read(query: str, *, keep: bool) -> None:
        url = f"{stack.urls[GATEWAY]}/console/api/stream?{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            event = b""
            for line in answer:
                if stop.is_set():
                    return
                if line.startswith(b"event: "):
                    event = line[7:].strip()
                elif keep and event == b"river" and line.startswith(b"data: "):
                    seen.append({name: value for name, value in json.loads(line[6:]).items() if name != "rows"})

    threads = [
        threading.Thread(target=read, args=(query,), kwargs={"keep": n == 0}, daemon=True)
        for n, query in enumerate(queries)
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)

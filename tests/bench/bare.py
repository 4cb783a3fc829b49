"""The bare chain: the cost of three hops over streams with plain redis-py and nothing else.

    source -> stream -> hop1 -> stream -> hop2 -> stream -> subscriber

One entry per event, one process per hop, as many processes as the services have. A hop reads all available entries and
writes them in one pipeline, so the chain batches under load by itself. It delivers neither exactly once nor to several
subscribers, keeps no state, and does not use HTTP. One process: ``python -m tests.bench.bare URL source|hop1|hop2``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import redis.asyncio
import uvloop

from tests.bench.jobs import BLOCK_S, CHAIN, Load, Worker

STREAMS = ["bench:bare:0", "bench:bare:1", "bench:bare:2"]
READ_COUNT = 256
_ENTRY = (
    b'{"type":"chunk","run":"bare","seq":%d,"turn":0,"attempt":1,"block":0,"kind":"text","text":"%019d ",'
    b'"visible":true,"depth":0}'
)
"""A chunk as on `visible`; its text is the time at which it was created."""


async def source(client: Any) -> None:
    """Sends the requested load."""
    worker = Worker(client, "source")
    while True:
        load = await worker.job(Load)
        await (_paced(client, load) if load.pace else _at_once(client, load))
        await worker.answer(True)


async def _paced(client: Any, load: Load) -> None:
    """Each run has its own clock, as in the mock provider; all due chunks go out in one pipeline."""
    due: list[bytes] = []
    woken = asyncio.Event()
    now = asyncio.get_running_loop().time
    start = now()

    async def run(number: int) -> None:
        begin = start + number * load.stagger_s
        for n in range(load.chunks):
            await asyncio.sleep(max(0.0, begin + n / load.pace - now()))
            due.append(_ENTRY % (n, time.monotonic_ns()))
            woken.set()

    async def write() -> None:
        left = load.total
        while left:
            await woken.wait()
            woken.clear()
            entries = due.copy()
            due.clear()
            await _write(client, STREAMS[0], entries)
            left -= len(entries)

    await asyncio.gather(write(), *(run(number) for number in range(load.runs)))


async def _at_once(client: Any, load: Load) -> None:
    for n in range(load.chunks):
        await _write(client, STREAMS[0], [_ENTRY % (n, time.monotonic_ns()) for _ in range(load.runs)])


async def hop(client: Any, here: str, there: str) -> None:
    """Forwards entries."""
    last: bytes | str = "0-0"
    while True:
        for _, entries in await client.xread({here: last}, count=READ_COUNT, block=BLOCK_S * 1000):
            await _write(client, there, [fields[b"__data__"] for _, fields in entries])
            last = entries[-1][0]


async def _write(client: Any, stream: str, entries: list[bytes]) -> None:
    if len(entries) == 1:
        await client.xadd(stream, {"__data__": entries[0]})
        return
    pipe = client.pipeline(transaction=False)
    for entry in entries:
        pipe.xadd(stream, {"__data__": entry})
    await pipe.execute()


async def main(url: str, name: str) -> None:
    """One process of the chain; it runs until it is stopped."""
    client: Any = redis.asyncio.Redis.from_url(url, protocol=2)
    place = CHAIN.index(name)
    await Worker(client, name).answer(True)
    await (hop(client, STREAMS[place - 1], STREAMS[place]) if place else source(client))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))

"""The subscriber of both chains: plain redis-py, one XREAD over all streams, decoded JSON, recorded arrival times.

One process: ``python -m tests.bench.subscriber URL``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from typing import Any

import msgspec
import redis.asyncio
import uvloop

from tests.bench.jobs import Listen, Received, Worker

NAME = "subscriber"
READ_COUNT = 1000
BLOCK_MS = 500


class _Text(msgspec.Struct):
    text: str


_decoder = msgspec.json.Decoder(_Text)


async def main(url: str) -> None:
    """Runs its jobs until it is stopped."""
    client: Any = redis.asyncio.Redis.from_url(url, protocol=2)
    worker = Worker(client, NAME)
    await worker.answer(True)
    while True:
        job = await worker.job(Listen)
        offsets = {stream: await _end(client, stream) for stream in job.streams}
        await worker.answer(True)
        await worker.answer(await _listen(client, job, offsets))


async def _end(client: Any, stream: str) -> Any:
    last = await client.xrevrange(stream, count=1)
    return last[0][0] if last else "0-0"


async def _listen(client: Any, job: Listen, offsets: dict[str, Any]) -> Received:
    sent, arrived = array("q"), array("q")
    now = asyncio.get_running_loop().time
    until = now() + job.timeout_s
    while len(sent) < job.stamps and now() < until:
        found = await client.xread(offsets, count=READ_COUNT, block=BLOCK_MS)
        for name, entries in found:
            offsets[name.decode()] = entries[-1][0]
            for _, fields in entries:
                # Chunks may have been joined on the way: each piece of text is the stamp of one.
                stamps = [int(word) for word in _decoder.decode(fields[b"__data__"]).text.split()]
                sent.extend(stamps)
                arrived.extend([time.monotonic_ns()] * len(stamps))
    return Received(sent.tobytes(), arrived.tobytes())


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))

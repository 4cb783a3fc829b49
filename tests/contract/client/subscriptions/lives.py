"""A subscriber that lives many times: forked, killed with -9 in the middle of its work, and forked again.

``python -m tests.contract.client.subscriptions.lives URL PREFIX KIND LIVES SEED`` prints ``run seq`` of each event that
was handled, by any life, and ends after the last life. KIND: ``group``, ``cursor`` (kept in a file after each event)
or ``follow``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tokenbus import Chunk, Client, Cursor
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.topic_reader import Selection

LEASE_S = 0.1
"""How long a dead worker's partitions wait for the next life."""


async def live(url: str, prefix: str, kind: str, before: str, kept: Path, out: int) -> None:
    async with Client(url, prefix=prefix, partitions=4) as bus:
        async for event, after in events(bus, kind, before):
            os.write(out, f"{event.run} {event.seq}\n".encode())  # this is the handling
            if after is not None:
                fresh = kept.with_suffix(".new")
                fresh.write_text(after)
                fresh.replace(kept)


async def events(bus: Client, kind: str, before: str) -> AsyncIterator[tuple[Any, str | None]]:
    if kind == "group":
        subscription: SharedSubscription[Any] = SharedSubscription(
            bus._deployment,  # for a lease that is shorter than users may have
            "visible",
            group="g",
            begin="start",
            selection=Selection("visible"),
            ack="auto",
            prefetch=8,
            reconnect_s=30,
            lease_s=LEASE_S,
        )
        async with subscription as taken:
            async for event in taken:
                yield event, None
    elif kind == "cursor":
        begin = Cursor.parse(before) if before else "start"
        async with bus.subscribe("visible", kinds=Chunk, from_=begin, ack="explicit", prefetch=8) as taken:
            async for event in taken:
                taken.ack(event)
                yield event, str(taken.cursor)
    else:
        async for event in bus.follow("r0", after=int(before or -1)):
            yield event, str(event.seq)


def main(url: str, prefix: str, kind: str, lives: int, seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        kept = Path(directory, "kept")
        for _ in range(lives):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(read)
                try:
                    before = kept.read_text() if kept.exists() else ""
                    asyncio.run(live(url, prefix, kind, before, kept, write))
                finally:
                    os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as lines:
                for _ in range(chance.randint(1, 20)):
                    if not (line := lines.readline()):
                        break
                    print(line.decode().strip())
                os.kill(child, signal.SIGKILL)
                print(lines.read().decode(), end="", flush=True)  # handled before the blow
            os.waitpid(child, 0)


if __name__ == "__main__":
    url, prefix, kind, lives, seed = sys.argv[1:]
    main(url, prefix, kind, int(lives), int(seed))

"""Watches all visible text and cancels a run whose text contains a forbidden word.

python moderation.py kumquat …    # beside `tokenbus up --mock`, or with TOKENBUS_REDIS_URL=redis://…
"""

import asyncio
import sys
from collections import defaultdict

from tokenbus import Chunk, Client

KEPT = 200
"""Characters of a run that are searched: a word may be split over several chunks."""
RUNS = 10_000
"""Maximum runs to remember. Beyond it the oldest is dropped."""


async def main(forbidden: list[str]) -> None:
    tails: dict[str, str] = defaultdict(str)
    stopped: set[str] = set()

    async with Client() as bus:

        async def watch(chunk: Chunk) -> None:
            tails[chunk.run] = (tails[chunk.run] + chunk.text.casefold())[-KEPT:]
            if len(tails) > RUNS:
                stopped.discard(oldest := next(iter(tails)))
                del tails[oldest]
            found = next((word for word in forbidden if word in tails[chunk.run]), None)
            if found and chunk.run not in stopped:  # chunks already published still arrive
                stopped.add(chunk.run)
                await bus.cancel(chunk.run, f"moderation: {found}", heard_through=chunk.seq)
                print(f"stopped {chunk.run}: {found}", flush=True)

        await bus.subscribe("visible", group="moderation", kinds=Chunk).each(watch, concurrency=20)


if __name__ == "__main__":
    asyncio.run(main([word.casefold() for word in sys.argv[1:]]))

"""`python -m tests.bench.hostile_server PORT`: the hostile provider of the chaos, as a process of its own."""

from __future__ import annotations

import asyncio
import sys

from tests.chaos.hostile import hostile_provider


async def _serve(port: int) -> None:
    async with hostile_provider(port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))

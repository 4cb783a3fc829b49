"""Adds up tokens by tenant, from the terminal events of runs, and prints the sums as JSON lines.

A run's end tells what all of its attempts cost, however it ended. A count that no provider has reported is left out.

python token_accounting.py    # beside `tokenbus up --mock`, or with TOKENBUS_REDIS_URL=redis://…
"""

import asyncio
import json
from collections import Counter

from tokenbus import Cancelled, Client, Completed, Incomplete, RunFailedEvent, Started

ENDS = (Completed, Incomplete, RunFailedEvent, Cancelled)
COUNTS = ("input", "output", "reasoning", "cache_read", "cache_write", "total")


async def main() -> None:
    tenants: dict[str, str] = {}
    spent: Counter[tuple[str, str]] = Counter()
    async with Client() as bus, bus.subscribe("runs", kinds=(Started, *ENDS), from_="start") as runs:
        async for event in runs:
            if isinstance(event, Started):
                tenants[event.run] = str((event.metadata or {}).get("tenant", "nobody"))
            elif isinstance(event, ENDS):
                tenant = tenants.pop(event.run, "nobody")
                for count in COUNTS:
                    if (more := getattr(event.usage, count, None)) is not None:
                        spent[tenant, count] += more
                sums = {count: spent[tenant, count] for count in COUNTS if (tenant, count) in spent}
                print(json.dumps({"tenant": tenant, "run": event.run, **sums}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

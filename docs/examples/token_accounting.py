"""Adds up tokens by tenant, from the ends of runs, and prints the sums as JSON lines.

TOKENBUS_REDIS_URL=redis://localhost:6379 python token_accounting.py
"""

import asyncio
import json
from collections import Counter

from tokenbus import Client, Started, TerminalEvent, UsageReported


async def main() -> None:
    tenants: dict[str, str] = {}
    spent: Counter[tuple[str, str]] = Counter()
    async with Client() as bus, bus.subscribe("runs", from_="start") as runs:
        async for event in runs:
            if isinstance(event, Started):
                tenants[event.run] = str((event.metadata or {}).get("tenant", "nobody"))
            elif isinstance(event, UsageReported):
                tenant = tenants.get(event.run, "nobody")
                spent[tenant, "input"] += event.usage.input or 0
                spent[tenant, "output"] += event.usage.output or 0
            elif isinstance(event, TerminalEvent):
                tenant = tenants.pop(event.run, "nobody")
                sums = {kind: spent[tenant, kind] for kind in ("input", "output")}
                print(json.dumps({"tenant": tenant, "run": event.run, **sums}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

"""One gateway's counter of spend as a process, to be killed: URL PREFIX PARTITIONS."""

from __future__ import annotations

import asyncio
import sys

from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.pricing import PriceTable
from tokenbus_services.settings.tables.gateway import KeyRules, PriceSettings

PRICES = {
    "anthropic/claude": PriceSettings(input=3, output=15, cache_read=0.3, cache_write=3.75),
    "anthropic/claude-haiku": PriceSettings(input=1, output=5),
    "other/": PriceSettings(input=0, output=100),
}


def counter(server: Server, bus: Client, keys: Keys) -> SpendCounter:
    """A counter for clients without limits."""

    async def rules_of(key_id: str) -> KeyRules:
        return KeyRules()

    return SpendCounter(
        server,
        bus,
        keys,
        prices=PriceTable(PRICES),
        apis={"anthropic": "anthropic", "other": "openai-chat"},
        rules_of=rules_of,
        keep_ms=600_000,
    )


async def main(url: str, prefix: str, partitions: str) -> None:
    keys = Keys(prefix, int(partitions))
    async with Server(url) as server, Client(url, prefix=prefix, partitions=keys.partitions) as bus:
        await counter(server, bus, keys).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

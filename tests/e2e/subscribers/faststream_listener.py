"""A plain FastStream subscriber that uses nothing but the topics: prints the text that it receives.

Run by test_subscribers.py as a process of its own: url, prefix and number of partitions are its arguments.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub

url, prefix, partitions = sys.argv[1], sys.argv[2], int(sys.argv[3])
broker = RedisBroker(url, logger=None)  # pyright: ignore[reportArgumentType]
app = FastStream(broker, logger=None)

for n in range(partitions):

    @broker.subscriber(stream=StreamSub(f"{prefix}:{{{n}}}:visible", last_id="0-0"))
    async def on_event(event: dict[str, Any]) -> None:
        print(event["seq"], repr(event["text"]), flush=True)


if __name__ == "__main__":
    asyncio.run(app.run())

"""An agent that books a table asks a person first, and goes on with the answer, days and new versions later.

python booking.py ask "A table for two at Mario's, at eight"    # beside `tokenbus up`; prints the run, and ends
python booking.py read RUN                                      # what became of it, from its first event on

In between, a person answers in the console or by `tokenbus approve RUN`. Until then no process waits for that: stop all
services, upgrade them, and start them again.
"""

import asyncio
import os
import sys
from pathlib import Path

from tokenbus import BlockComplete, Client, Resumed, Waiting

BOOKINGS = Path(__file__).with_name("bookings.txt")


def book(place: str, at: str, people: int) -> str:
    """The tool: it runs once somebody allowed it."""
    with BOOKINGS.open("a") as bookings:
        bookings.write(f"{place}, {at}, {people}\n")
    return "booked"


async def main(what: str, text: str) -> None:
    async with Client() as bus:
        if what == "ask":
            model = {"provider": "anthropic", "model": os.environ.get("BOOKING_MODEL", "claude-sonnet-4-6")}
            tools = [{"name": "book"}]
            run = await bus.publish({**model, "messages": [{"role": "user", "content": text}], "tools": tools})
            print("run", run.id, flush=True)
            return
        async for event in bus.follow(text):
            match event:
                case Waiting():
                    print("waits:", event.tool_name, event.arguments, flush=True)
                case Resumed():
                    print(event.decision, "over", event.door, flush=True)
                case BlockComplete(kind="text"):
                    print(event.content, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))

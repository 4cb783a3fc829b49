"""Stores every complete block in SQLite. An event that is delivered again after a crash is stored once.

python transcript_store.py transcripts.db    # beside `tokenbus up --mock`, or with TOKENBUS_REDIS_URL=redis://…
"""

import asyncio
import sqlite3
import sys

from tokenbus import BlockComplete, Client

TABLE = """CREATE TABLE IF NOT EXISTS blocks
    (run TEXT, seq INTEGER, kind TEXT, tool TEXT, content TEXT, PRIMARY KEY (run, seq))"""


async def main(path: str) -> None:
    database = sqlite3.connect(path)
    database.execute(TABLE)
    async with (
        Client() as bus,
        bus.subscribe("blocks", group="transcripts", from_="start", kinds=BlockComplete, ack="explicit") as blocks,
    ):
        async for block in blocks:
            row = (block.run, block.seq, block.kind, block.tool_name, block.content or block.arguments)
            with database:  # one transaction
                database.execute("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?, ?)", row)
            blocks.ack(block)  # after it is stored: an unacknowledged block is delivered again


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

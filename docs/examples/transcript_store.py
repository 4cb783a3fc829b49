"""Keeps every complete block in SQLite. An event may come again after a crash: it is stored once.

TOKENBUS_REDIS_URL=redis://localhost:6379 python transcript_store.py transcripts.db
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
            blocks.ack(block)  # only now: what is not stored comes again


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""An entry that is far larger than any request, on a server that accepts it: only its own run ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, Worker, ended, fleet
from tests.e2e.judge import check
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Turn
from tokenbus_services.process.embedded_server import EmbeddedServer

HUGE_BYTES = 400 * 2**20
GROWTH_BYTES = 48 * 2**20
"""Far below the size of the entry, and above what some runs take."""
PIECE = b"x" * 2**20


async def put_huge(port: int, stream: str, run: str) -> None:
    """XADD a request with a text of `HUGE_BYTES`, sent in pieces."""
    head = b'{"type":"generate","id":"%b","messages":["' % run.encode()
    size = len(head) + HUGE_BYTES + 3
    words = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in (b"XADD", stream.encode(), b"*", b"__data__"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"*5\r\n%b$%d\r\n%b" % (words, size, head))
    for _ in range(HUGE_BYTES // len(PIECE)):
        writer.write(PIECE)
        await writer.drain()
    writer.write(b'"]}\r\n')
    assert (await reader.readline()).startswith(b"$")
    writer.close()


def peak_bytes(worker: Worker) -> int:
    """The most memory that the worker ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{worker.process.pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


async def test_a_huge_entry_costs_no_worker_memory_and_other_requests_go_through(tmp_path: Path) -> None:
    keys = Keys(prefix="huge", partitions=2)
    script = Script(name="hello", turns=(Turn(says=Reply(text="Hello.")),))
    with EmbeddedServer(binary=binary(), options={"proto-max-bulk-len": "512mb"}) as process:
        async with (
            MockProvider([script]) as provider,
            fleet(tmp_path, process.url, keys, provider.url, PIPELINE) as running,
            Server(process.url) as server,
        ):
            send = sender(server, keys)
            await ended(server.client, keys, [await send("hello")])
            workers = [running.worker_of(kind) for kind in PIPELINE]
            before = [peak_bytes(worker) for worker in workers]
            await put_huge(process.port, keys.requests, "giant")
            runs = [await send("hello") for _ in range(5)]
            logs: Any = await ended(server.client, keys, runs)

            async def is_buried() -> bool:
                return await server.client.xlen(keys.requests) == 0 and await server.client.xlen(keys.dead) == 1

            await eventually(is_buried)
            [(_, fields)] = await server.client.xrange(keys.dead)
            after = [peak_bytes(worker) for worker in workers]
            for run in runs:
                check(logs[run])
                assert logs[run][-1]["type"] == "completed"
    assert b"giant" in b" ".join(fields.values())
    assert [
        grown for grown in (now - then for now, then in zip(after, before, strict=True)) if grown > GROWTH_BYTES
    ] == []

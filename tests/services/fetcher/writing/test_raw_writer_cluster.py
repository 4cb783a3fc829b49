"""While one node of a Cluster does not reply, frames of attempts on the other nodes are written."""

from __future__ import annotations

import os
import signal

from tests.servers import cluster_group
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import Data, Ended
from tokenbus_services.fetcher.writing.raw_writer import RawWriter

KEYS = Keys("apart", 6)


async def test_a_stalled_node_delays_only_the_attempts_of_its_partitions() -> None:
    runs = {KEYS.partition_of(f"run{n}"): f"run{n}" for n in range(100)}
    with cluster_group(cluster_require_full_coverage="no") as group:
        node = group.master_of(KEYS.topic(0, "raw"))
        there = {p for p in runs if group.master_of(KEYS.topic(p, "raw")) is node}
        elsewhere = set(runs) - there
        assert elsewhere
        async with Server(group.url) as server:
            for run in runs.values():
                await server.client.hset(KEYS.run(run), mapping={"status": "open", "attempt": 1, "raw": 0})
            writer = RawWriter(server, KEYS, linger_s=0.003, lag_bytes=2**20)
            await writer.open()
            attempts = {p: writer.attempt(run, 0, 1, lambda reason: None) for p, run in runs.items()}

            async def written(partitions: set[int], entries: int) -> bool:
                return all([await server.client.xlen(KEYS.topic(p, "raw")) >= entries for p in partitions])

            for attempt in attempts.values():
                attempt.write_item(Data(b"first"), urgent=True)
            await eventually(lambda: written(set(runs), 1))
            os.kill(node.pid, signal.SIGSTOP)
            try:
                for attempt in attempts.values():
                    attempt.write_item(Data(b"second"), urgent=True)
                await eventually(lambda: written(elsewhere, 2))
                for partition in elsewhere:
                    await attempts[partition].end(Ended())
            finally:
                os.kill(node.pid, signal.SIGCONT)
            for partition in there:
                await attempts[partition].end(Ended())
            await eventually(lambda: written(set(runs), 3))
            await writer.close()

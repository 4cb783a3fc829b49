"""A partition's state from what lies on the server: checkpoints, and the entries from the watermark to the offset."""

from __future__ import annotations

import asyncio
import logging

from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.partition import Partition
from tokenbus.bus.reader import Entry
from tokenbus.bus.server import Server

log = logging.getLogger(__name__)

REPLAY_PAGE = 200


async def rebuild(server: Server, keys: Keys, part: Partition, lease: Lease) -> None:
    """Bring a new partition to where its last owner stood. Raises what redis-py raises: then begin with a new one."""
    client = server.client
    part.loads = await client.hincrby(part.lease_key, "loads", 1)
    entry_id, _, tries = (await client.hget(part.lease_key, "suspect") or b"").decode().partition(" ")
    part.suspect = entry_id, int(tries or 0)
    part.restore(await client.hgetall(part.state_key))
    while part.offset != lease.offset:
        page: list[Entry] = await client.xrange(part.stream, f"({part.offset}", lease.offset, count=REPLAY_PAGE)
        if not page:
            token = await client.hget(part.lease_key, "token")
            if token is None or token.decode() == part.token:
                log.error("%s: entries are gone that a replay needs", part.lease_key)
            break  # else another has the partition by now, and trimmed what it does not need: nothing of this counts
        part.replay(page)
        await asyncio.sleep(0)  # other partitions go on meanwhile
    runs = part.settle(lease.offset)
    pipe = client.pipeline(transaction=False)
    for run in runs:
        pipe.hget(keys.run(run), "seq")
    for run, seq in zip(runs, await pipe.execute() if runs else (), strict=True):
        if seq:
            part.logic.recall(run, int(seq))


async def standing(server: Server, part: Partition) -> tuple[Lease, str]:
    """Where the server stands now, as a lease, and the last entry of the input. Raises what redis-py raises."""
    offset, watermark = await server.client.hmget(part.lease_key, ["offset", "watermark"])
    last: list[Entry] = await server.client.xrevrange(part.stream, count=1)
    at = offset.decode()
    return Lease(part.number, part.token, at, watermark.decode()), last[0][0].decode() if last else at

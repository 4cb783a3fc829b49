"""Whether the server could write to its disk, from its own statistics. After a failure it may refuse all writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenbus.bus.server.server import Server

_STATES = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")


def disk_states(info: Mapping[str, Any]) -> dict[str, str]:
    """By field of INFO: how the last write of that kind ended, ``ok`` if well. A hosted server may not say."""
    return {field: str(info[field]) for field in _STATES if field in info}


async def read_disk_states(server: Server) -> dict[str, dict[str, str]]:
    """`disk_states` of each primary, by its name. Raises redis-py's errors."""
    client = server.client
    if server.topology == "cluster":
        infos: dict[str, dict[str, Any]] = await client.info("persistence", target_nodes=client.PRIMARIES)
        return {name: disk_states(info) for name, info in infos.items()}
    return {server.url.safe: disk_states(await client.info("persistence"))}

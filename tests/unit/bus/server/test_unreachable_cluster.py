"""What a Cluster that cannot be reached is called: by one command, and by many in a pipeline."""

from __future__ import annotations

import socket

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import ServerUnavailable


async def test_a_command_and_a_pipeline_lose_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with Server(f"redis+cluster://127.0.0.1:{port}") as server:
        with pytest.raises(ConnectionLost):
            await server.client.get("a")
        pipe = server.client.pipeline(transaction=False)
        pipe.get("a")
        with pytest.raises(ConnectionLost):
            await pipe.execute()
        keys = Keys("t", 2)
        keys.widen([2, 4], 4)
        with pytest.raises(ServerUnavailable), translated(server):
            await locate(server, keys, *map(str, range(9)))

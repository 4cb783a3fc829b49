"""What an unreachable group of sentinels is called."""

from __future__ import annotations

import socket

import pytest

from tokenbus.bus.server.connection_fixes import prompt
from tokenbus.bus.server.server import Server
from tokenbus.errors import ServerUnavailable


async def test_sentinels_that_do_not_answer_are_one_short_line_with_the_cause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with Server(f"redis+sentinel://127.0.0.1:{port},127.0.0.1:{port}/main") as server:
        with pytest.raises(ServerUnavailable) as caught:
            await server.check()
    assert "No master found for 'main': " in str(caught.value)
    assert "ConnectionError" in str(caught.value)
    assert "redis.asyncio" not in str(caught.value)
    assert len(str(caught.value)) < 300


async def test_the_connections_to_sentinels_are_ours_too() -> None:
    """redis-py's own may swallow a cancellation, and raise a plain RuntimeError for a write after a reset."""
    async with Server("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main") as server:
        pool = server.client.connection_pool
        kinds = [
            pool.connection_class,
            *(one.connection_pool.connection_class for one in pool.sentinel_manager.sentinels),
        ]
        assert len(kinds) == 3
        assert all(kind is prompt(kind.__mro__[1]) for kind in kinds)

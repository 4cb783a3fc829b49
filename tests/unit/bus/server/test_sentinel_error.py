"""What an unreachable group of sentinels is called."""

from __future__ import annotations

import socket

import pytest

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

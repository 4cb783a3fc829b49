"""What those who publish hear if their client ends."""

from __future__ import annotations

import asyncio

import pytest

from tokenbus.bus.server.server import Server
from tokenbus.client.publishing import PublishQueue


async def test_a_publisher_is_told_if_the_end_of_its_client_is_cancelled() -> None:
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with Server(f"redis://127.0.0.1:{port}") as server:
            queue = PublishQueue(server, most_queued=1)
            publisher = asyncio.create_task(queue.put("requests", b"{}", most=1))
            await asked.wait()
            end = asyncio.create_task(queue.close())
            await asyncio.sleep(0)
            end.cancel()
            with pytest.raises(asyncio.CancelledError):
                await end
            with pytest.raises(RuntimeError, match="the client is closed"):
                async with asyncio.timeout(10):
                    await publisher

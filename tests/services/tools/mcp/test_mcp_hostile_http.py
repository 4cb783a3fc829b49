"""An endpoint that answers without end, or with what unpacks without end, costs a bounded amount."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.tools.mcp.conftest import Start, answer
from tokenbus_services.settings import McpHttp


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_an_answer_without_end_is_not_gathered(start: Start, encoding: str) -> None:
    closed: list[bool] = []

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: {encoding}\r\n\r\n"
        writer.write(head.encode())
        try:
            while True:
                writer.write(b"[" * 65536)
                await writer.drain()
        except ConnectionError:
            closed.append(True)
        finally:
            writer.close()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        executor = await start(
            message_bytes=100_000, far=McpHttp(url=f"http://127.0.0.1:{port}/mcp", allow_private=True)
        )
        assert closed, "it was read no further"
        assert executor.mcp.definitions == {}
        outcome = await answer(executor, "far__any")
        assert outcome.is_error
        await executor.close()

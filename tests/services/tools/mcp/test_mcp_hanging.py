"""An MCP connection that does not end, however it is asked to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from tests.services.tools.conftest import MemoryBlobs
from tests.services.tools.mcp.conftest import Notes, answer, stdio
from tests.waiting import eventually
from tokenbus_services.settings import LimitSettings
from tokenbus_services.tools.executor import ToolExecutor, ToolRegistry
from tokenbus_services.tools.mcp import server as module
from tokenbus_services.tools.mcp.server import McpServer


async def test_a_connection_that_hangs_during_close_is_abandoned_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CLOSE_S", "CUT_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.05)
    let_end, begun, ended = asyncio.Event(), list[int](), list[int]()

    @asynccontextmanager
    async def hangs() -> AsyncGenerator[Any]:
        number = len(begun)
        begun.append(number)
        to_session, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, from_session = anyio.create_memory_object_stream[Any](0)
        try:
            yield incoming, outgoing
        finally:
            while not let_end.is_set():
                with suppress(asyncio.CancelledError):
                    await let_end.wait()
            for stream in (to_session, incoming, outgoing, from_session):
                stream.close()
            ended.append(number)

    server = McpServer("hangs", "", lambda lost: hangs(), connect_timeout_s=0.05, listed=lambda: None)
    keeping = asyncio.create_task(server.keep())
    await eventually(lambda: len(begun) > 1)
    assert not ended
    keeping.cancel()
    await asyncio.wait({keeping}, timeout=60)
    assert keeping.cancelled()
    let_end.set()
    await eventually(lambda: len(ended) == len(begun))


async def test_a_connection_that_cancels_itself_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    begun = list[int]()

    @asynccontextmanager
    async def cancels() -> AsyncGenerator[Any]:
        begun.append(len(begun))
        raise asyncio.CancelledError
        yield

    server = McpServer("cancels", "", lambda lost: cancels(), connect_timeout_s=5, listed=lambda: None)
    keeping = asyncio.create_task(server.keep())
    await eventually(lambda: len(begun) > 1)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait({keeping}, timeout=60)


async def test_a_server_that_hangs_in_initialize_does_not_delay_the_first_call_of_another_servers_tool(
    blobs: MemoryBlobs, notes: Notes
) -> None:
    env = {**os.environ, "NOTES": str(notes.path)}
    silent = stdio(script="import sys; sys.stdin.read()", connect_timeout_s=300)
    servers = {"hangs": silent, "here": stdio(env_pass=("NOTES",))}
    registry = ToolRegistry({}, servers, env=env, message_bytes=2**20)
    executor = ToolExecutor(registry, LimitSettings(), blobs)
    await executor.open()
    try:
        assert (await answer(executor, "here__echo", '{"text": "at once"}')).content == "at once"
        assert executor.mcp
        assert not executor.mcp.ready  # which it would be, had the call waited for all servers
    finally:
        await executor.close()

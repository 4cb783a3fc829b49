"""Servers of the protocol's older versions, which begin with a handshake, are served as well."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.services.tools.conftest import call
from tests.services.tools.mcp.conftest import Notes, Start, answer
from tests.waiting import eventually
from tokenbus_services.settings import McpStdio

OLDER = Path(__file__).with_name("older_server.py")


async def test_an_older_server_is_listed_page_by_page_called_and_notified_of_a_cancel(
    start: Start, notes: Notes
) -> None:
    executor = await start(old=McpStdio(command=sys.executable, args=(str(OLDER),), prefix="o_"))
    assert [tool.name for tool in executor.mcp.definitions["old"]] == ["o_wait"]
    running = asyncio.create_task(executor.execute(call("o_wait")))

    def changed() -> bool:
        return "o_late" in {tool.name for tool in executor.mcp.definitions["old"]}

    await eventually(changed)
    assert (await answer(executor, "o_late")).content == '{"degrees":7}'
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await notes.has("notifications/cancelled")


async def test_an_error_with_the_code_of_a_closed_connection_ends_no_other_call(start: Start, notes: Notes) -> None:
    executor = await start(old=McpStdio(command=sys.executable, args=(str(OLDER),)))
    running = asyncio.create_task(executor.execute(call("old__wait")))
    await eventually(lambda: len(executor.mcp.definitions["old"]) == 2)
    outcome = await answer(executor, "old__late", '{"fail": true}')
    assert (outcome.content, outcome.is_error) == ("MCP error -32000: out of order", True)
    assert not (await answer(executor, "old__late")).is_error
    assert not running.done()
    assert len(notes.pids) == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

"""MCP servers behind Streamable HTTP: the same capability, and what only a network can do wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.services.tools.conftest import call
from tests.services.tools.mcp.conftest import SAMPLE, Notes, Start, answer
from tests.waiting import eventually
from tokenbus_services.settings import McpHttp

Serve = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def serve(port: int, notes: Notes) -> Iterator[Serve]:
    """Starts the sample server, each time on the same port."""
    started: list[subprocess.Popen[bytes]] = []

    def make() -> subprocess.Popen[bytes]:
        env = {**os.environ, "NOTES": str(notes.path)}
        server = subprocess.Popen([sys.executable, str(SAMPLE), str(port)], env=env, stderr=subprocess.DEVNULL)
        started.append(server)
        return server

    yield make
    for server in started:
        server.kill()
        server.wait()


def settings(port: int, **changes: object) -> McpHttp:
    return McpHttp(url=f"http://127.0.0.1:{port}/mcp", allow_private=True, **changes)  # type: ignore[arg-type]


async def says(executor: object, text: str) -> None:
    """Returns once the server answers a call."""

    async def is_logged() -> bool:
        outcome = await answer(executor, "far__echo", f'{{"text": "{text}"}}')  # type: ignore[arg-type]
        return (outcome.content, outcome.is_error) == (text, False)

    await eventually(is_logged)


async def test_tools_of_a_server_that_comes_up_late_can_be_called(start: Start, serve: Serve, port: int) -> None:
    executor = await start(far=settings(port))
    outcome = await answer(executor, "far__echo", '{"text": "x"}')
    assert (outcome.is_error, executor.mcp.definitions) == (True, {})
    serve()
    await says(executor, "hello")
    assert "far__echo" in {tool.name for tool in executor.mcp.definitions["far"]}


async def test_a_cancelled_call_is_cancelled_at_the_server_and_others_continue(
    start: Start, serve: Serve, port: int, notes: Notes
) -> None:
    serve()
    executor = await start(far=settings(port))
    await says(executor, "ready")
    running = asyncio.create_task(executor.execute(call("far__slow")))
    await notes.has("began")
    await says(executor, "meanwhile")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await notes.has("cancelled")


async def test_a_killed_server_gives_error_results_and_works_again(
    start: Start, serve: Serve, port: int, notes: Notes
) -> None:
    server = serve()
    executor = await start(far=settings(port))
    await says(executor, "ready")
    running = asyncio.create_task(executor.execute(call("far__slow")))
    await notes.has("began")
    server.send_signal(signal.SIGKILL)
    lost = await asyncio.wait_for(running, 60)
    assert lost.is_error
    server.wait()
    assert (await answer(executor, "far__echo", '{"text": "x"}')).is_error
    serve()
    await says(executor, "again")


async def test_the_list_is_read_again_when_the_server_says_that_it_changed(
    start: Start, serve: Serve, port: int
) -> None:
    serve()
    executor = await start(far=settings(port))
    await says(executor, "ready")
    assert (await answer(executor, "far__grow")).content == "grown"

    async def there() -> bool:
        return (await answer(executor, "far__late")).content == "late"

    await eventually(there)


async def test_an_answer_over_the_bound_is_an_error_and_the_next_call_works(
    start: Start, serve: Serve, port: int
) -> None:
    serve()
    executor = await start(message_bytes=50_000, limit=10**6, far=settings(port))
    await says(executor, "ready")
    outcome = await answer(executor, "far__echo", '{"text": "' + "x" * 60_000 + '"}')
    assert outcome.is_error
    await says(executor, "on")

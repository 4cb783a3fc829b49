"""Runs an MCP server as a child process: messages are lines on its stdin and stdout.

The package's own transport accepts lines of any length; this one limits them. The child leads its own process group, so
that Ctrl-C in the terminal does not kill it before its calls end, and so that none of its processes is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import anyio
import mcp_types as types
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

END_S = 2.0
"""How long the child may take to exit after its stdin is closed, and again after SIGTERM."""
MOST_BAD_LINES = 1000
"""Maximum lines per connection that are not messages (a stray print, say); these are skipped."""
_STDERR_CHARS = 2000

Streams: TypeAlias = (
    "tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]"
)

_log = structlog.stdlib.get_logger()


@asynccontextmanager
async def child(
    server: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    message_bytes: int,
    lost: Callable[[str], None],
) -> AsyncGenerator[Streams]:
    """Open the transport. Once it is closed, no process of the server is running.

    ``lost`` is called when the child stops communicating. Raises OSError if the command cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, limit=message_bytes, start_new_session=True
    )
    _log.info("mcp_server_started", server=server, pid=process.pid)
    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, server, process, to_session, lost)
            tasks.start_soon(_write, process, from_session, lost)
            tasks.start_soon(_log_stderr, server, process)
            try:
                yield incoming, outgoing
            finally:
                incoming.close()
                outgoing.close()
                with anyio.CancelScope(shield=True):
                    await _end(process)
                tasks.cancel_scope.cancel()
    finally:
        # kill what the child left behind, or the child itself if the shutdown was interrupted
        _signal(process, signal.SIGKILL)
        for stream in (to_session, incoming, outgoing, from_session):
            stream.close()
        # No public API closes the pipes while another process may hold their other ends.
        if transport := getattr(process, "_transport", None):
            transport.close()


async def _read(
    server: str,
    process: Process,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    lost: Callable[[str], None],
) -> None:
    assert process.stdout
    bad = 0
    problem = "it exited"
    async with to_session:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session is over
            while bad <= MOST_BAD_LINES:
                try:
                    line = await process.stdout.readuntil(b"\n")
                except asyncio.LimitOverrunError:
                    problem = "it sent a message over `limits.mcp_message_bytes`"
                    break
                except (asyncio.IncompleteReadError, OSError):
                    break
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    bad += 1
                    if bad == 1:
                        _log.warning("mcp_stdout_not_a_message", server=server, line=repr(line[:200]))
                    continue
                await to_session.send(SessionMessage(message))
            else:
                problem = f"it wrote over {MOST_BAD_LINES} lines that are not messages"
        lost(problem)


async def _write(
    process: Process, from_session: MemoryObjectReceiveStream[SessionMessage], lost: Callable[[str], None]
) -> None:
    assert process.stdin
    async with from_session:
        try:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            lost("it accepts no more input")


async def _log_stderr(server: str, process: Process) -> None:
    assert process.stderr
    with suppress(OSError):
        while text := await process.stderr.read(_STDERR_CHARS):
            _log.debug("mcp_stderr", server=server, text=text.decode(errors="replace"))


async def _end(process: Process) -> None:
    """Shut down in the order of https://modelcontextprotocol.io/specification/2025-11-25/basic/lifecycle#shutdown."""
    assert process.stdin
    process.stdin.close()
    if await _ended(process):
        return
    _signal(process, signal.SIGTERM)
    if await _ended(process):
        return
    _signal(process, signal.SIGKILL)
    await _ended(process)


async def _ended(process: Process) -> bool:
    # `Process.wait` also waits for the pipes to close, which a grandchild may hold open.
    with anyio.move_on_after(END_S):
        while process.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return process.returncode is not None


def _signal(process: Process, number: signal.Signals) -> None:
    """Signal the whole group, whose id is the child's pid."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

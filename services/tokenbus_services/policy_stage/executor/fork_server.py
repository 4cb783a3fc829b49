"""The policy worker's side of the fork server (`executor.process`)."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import Process
from contextlib import suppress

import msgspec

from tokenbus.errors import SettingsError
from tokenbus_services.policy_stage.executor.messages import Setup
from tokenbus_services.policy_stage.executor.process import COMMAND, FORK, KILL, LENGTH, PID

END_S = 2.0
FORK_S = 20.0
"""A fork takes milliseconds, and longer on a machine without CPU. Ending the fork server ends all executors."""


class ForkServer:
    """Starts and kills executors. Call `open`, then `close`; after an error `open` a new one."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: Process | None = None
        self._sock: socket.socket | None = None
        self._forking = asyncio.Lock()

    async def open(self) -> None:
        """Start it and wait until it has loaded the policies. Raises SettingsError if one cannot be loaded; OSError."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        self._sock = ours
        with its:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tokenbus_services.policy_stage.executor.process", str(its.fileno())),
                pass_fds=[its.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # output printed by policies must not mix with the worker's stdout
            )
        loop = asyncio.get_running_loop()
        body = msgspec.msgpack.encode(self._setup)
        await loop.sock_sendall(ours, LENGTH.pack(len(body)) + body)
        (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
        problem = msgspec.msgpack.decode(await self._receive(length), type=tuple[str, str, str] | None)
        if problem:
            raise SettingsError(*problem)

    async def fork(self, connection: socket.socket, page: int) -> int:
        """Fork an executor with this socket and this page; return its process id. Raises OSError.

        Do not cancel: the answer would be the next fork's.
        """
        assert self._sock
        async with self._forking, asyncio.timeout(FORK_S):
            socket.send_fds(self._sock, [COMMAND.pack(FORK, 0)], [connection.fileno(), page])
            (pid,) = PID.unpack(await self._receive(PID.size))
            return pid

    def kill(self, pid: int) -> None:
        """Kill an executor. Does nothing if it is gone; executors die with the fork server."""
        if self._sock:
            with suppress(OSError):
                self._sock.send(COMMAND.pack(KILL, pid))

    async def close(self) -> None:
        """Stop it, and all executors with it."""
        if self._sock:
            self._sock.close()
            self._sock = None
        if self._process:
            try:
                async with asyncio.timeout(END_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _receive(self, size: int) -> bytes:
        assert self._sock
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < size:
            if not (more := await loop.sock_recv(self._sock, size - len(data))):
                raise ConnectionError("the process from which executors are forked is gone")
            data += more
        return data

"""The policy worker's side of one executor process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Literal, cast

import msgspec
import structlog

from tokenbus_services.policy_stage.blame import End
from tokenbus_services.policy_stage.executor import messages
from tokenbus_services.policy_stage.executor.fork_server import ForkServer
from tokenbus_services.policy_stage.executor.interface import RunInExecutor, deliver
from tokenbus_services.policy_stage.executor.marks import MarksPage

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Serves = Literal["all", "restricted", "one"]
"""Which runs an executor gets: all; those of policies that ended or blocked an executor recently; a single one."""


class ExecutorProcess(asyncio.Protocol):
    """See `Executor`. Call `start`; it reports its end."""

    def __init__(
        self,
        *,
        serves: Serves,
        next_task: Callable[[], int],
        on_end: Callable[[ExecutorProcess], None],
        on_overrun: Callable[[ExecutorProcess, messages.Overran], None],
    ) -> None:
        self.serves: Serves = serves
        self.takes_place = serves == "one"
        """Whether it counts among the executors for single runs; one that was shared and is left to a run does not."""
        self.killed_with_all = False
        """Whether its fork server was given up, and all executors with it: no run's fault."""
        self.only_policy: str | None = None
        """The policy of the run that it was opened for, if this has a single one."""
        self.emptied = False
        """Whether its runs are done and it gets no further ones."""
        self.runs: dict[int, RunInExecutor] = {}
        """By task."""
        self.page = MarksPage()
        self.pid = 0
        self.base_bytes = 0
        """Its memory at startup."""
        self.step, self.still_s = 0, 0.0
        """The step in progress at the last look, and how long it has lasted."""
        self.beats, self.silent_s = 0, 0.0
        """The same for its event loop, while it has work to do."""
        self.dead_s = 0.0
        """How long its process has been gone while its connection is open."""
        self.killed_for: End | None = None
        self.overran: messages.Overran | None = None
        self._next_task = next_task
        self._on_end = on_end
        self._on_overrun = on_overrun
        self._transport: asyncio.Transport | None = None
        self._frames = messages.Frames(messages.from_executor)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when its end has been reported."""

    @property
    def single(self) -> bool:
        return self.takes_place

    async def start(self, server: ForkServer, memory_of: Callable[[int], int]) -> None:
        """Fork it. Raises OSError."""
        ours, its = socket.socketpair()
        try:
            with its:
                self.pid = await server.fork(its, self.page.fd)
            self.base_bytes = memory_of(self.pid)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            self.page.close()
            raise

    def open(
        self, run: str, policies: tuple[str, ...], failing: Mapping[str, messages.Failing], to: RunInExecutor
    ) -> int:
        task = self._next_task()
        self.runs[task] = to
        self.only_policy = policies[0] if len(policies) == 1 else None
        self._send(messages.Open(task, run, policies, dict(failing)))
        if self.gone.done():  # it ended before its first run came; its end was reported already
            asyncio.get_running_loop().call_soon(lambda: to.on_lost(None, suspect=False))
        return task

    def feed(self, task: int, frames: list[bytes]) -> None:
        self._send(messages.Feed(task, frames))

    def close(self, task: int) -> None:
        if self.runs.pop(task, None):
            self._send(messages.Close(task))
            self._end_if_empty()

    def leave_unused(self) -> None:
        """End it, unless it has a run: the run that it was forked for no longer needs it."""
        self.takes_place = False
        self._end_if_empty()

    def half_close(self) -> None:
        """Request that it finishes running work and exits."""
        if self._transport and not self._transport.is_closing():
            self._transport.write_eof()

    def cut_off(self) -> None:
        """Close the connection: the process is gone, but one that it left behind may hold the other end."""
        if self._transport:
            self._transport.abort()

    def _end_if_empty(self) -> None:
        if self.serves != "all" and not self.runs:
            self.emptied = True
            self.half_close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(messages.framed(message))

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except msgspec.DecodeError as e:  # a policy wrote to the executor's connection
            log.warning("policy_executor_unreadable", pid=self.pid, problem=str(e))
            assert self._transport
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(self)
        self.gone.set_result(None)

    def _on_message(self, message: messages.FromExecutor) -> None:
        if isinstance(message, messages.Overran):
            self._on_overrun(self, message)
        elif (run := self.runs.get(message.task)) and deliver(message, run):
            self.runs.pop(message.task, None)
            self._end_if_empty()

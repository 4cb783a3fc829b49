"""Stops a worker at any one command of its: so "between any two steps" can be tried for all of them in turn.

A doomed worker runs in a thread and an event loop of its own, as a process would. At the fault nothing of it gets on,
its heartbeats neither. A pipeline counts as the commands in it: it may be cut off in the middle.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal, Protocol

from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError

from tokenbus.bus.scripts import joined, present, renew
from tokenbus.bus.server.server import Server

Fault = Literal["dies after", "freezes before", "freezes after", "is not sent", "loses its reply"]
"""What happens at the chosen command. No worker dies before one: it leaves the same behind as a worker that died after
the command before. One that froze is different: before a command, it has already decided what to send when it thaws."""

_RENEW = renew("", "", token="", ttl_ms=0)
_UNCOUNTED = {call.script.sha for call in (present("", member="", ttl_ms=0), _RENEW, joined([_RENEW, _RENEW]))}
"""Faults that occur after a time, independent of the worker."""

GIVE_UP_S = 240


class Victim(Protocol):
    async def open(self) -> None: ...

    async def work(self) -> None:
        """Until it is cancelled."""
        ...

    async def close(self) -> None: ...


class Gate:
    """Stands between a worker and its server. While it is shut nothing gets through, as if the worker were frozen."""

    def __init__(self, server: Server) -> None:
        self._open = asyncio.Event()
        self._open.set()
        client = server.client
        command, pipeline = client.execute_command, client.pipeline

        async def execute_command(*args: Any, **options: Any) -> Any:
            await self._open.wait()
            reply = await command(*args, **options)
            await self._open.wait()
            return reply

        def gated_pipeline(**options: Any) -> Any:
            pipe = pipeline(**options)
            whole = pipe.execute

            async def execute(**options: Any) -> Any:
                await self._open.wait()
                replies = await whole(**options)
                await self._open.wait()
                return replies

            pipe.execute = execute
            return pipe

        client.execute_command = execute_command
        client.pipeline = gated_pipeline

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


class Doomed:
    """A worker that meets ``fault`` at its command number ``at``, counted from 0."""

    def __init__(self, url: str, fault: Fault, at: int) -> None:
        self.reached = threading.Event()
        """The fault has happened."""
        self.commands = 0
        self._url = url
        self.fault: Fault = fault
        self._at = at
        self._stopped: asyncio.Event | None = None
        """While it is there and not set, no command of this worker gets on."""
        self._dead = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, make: Callable[[Server], Victim], until: Callable[[Server], Awaitable[bool]]) -> None:
        """Work until the worker is dead, or ``until`` is true; a frozen one has to be thawed for that."""
        await asyncio.to_thread(asyncio.run, self._run(make, until))

    def thaw(self) -> None:
        """A frozen worker continues at the same step; one frozen while it closed may have given up."""
        assert self._loop
        assert self._stopped
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._stopped.set)

    async def _run(self, make: Callable[[Server], Victim], until: Callable[[Server], Awaitable[bool]]) -> None:
        self._loop = asyncio.get_running_loop()
        async with Server(self._url) as server, Server(self._url) as observer, asyncio.timeout(GIVE_UP_S):
            self._arm(server.client)
            life = asyncio.create_task(self._live(make(server), lambda: until(observer)))
            death = asyncio.create_task(self._dead.wait())
            await asyncio.wait({life, death}, return_when=asyncio.FIRST_COMPLETED)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if not life.cancelled():
                life.result()

    async def _live(self, victim: Victim, until: Callable[[], Awaitable[bool]]) -> None:
        work = asyncio.create_task(self._work(victim))
        while not await until() or self._is_stopped():
            if work.done():
                work.result()
            await asyncio.sleep(0.002)
        await victim.close()
        work.cancel()
        await asyncio.wait([work])

    @staticmethod
    async def _work(victim: Victim) -> None:
        while True:
            try:
                await victim.open()
                break
            except (RedisError, OSError):  # then the process ends, and is started again
                await asyncio.sleep(0.01)
        await victim.work()

    def _is_stopped(self) -> bool:
        return self._stopped is not None and not self._stopped.is_set()

    # --- between the worker and its server ------------------------------------------------------------------------

    def _arm(self, client: Any) -> None:
        command, pipeline = client.execute_command, client.pipeline

        async def execute_command(*args: Any, **options: Any) -> Any:
            return await self._one(args, lambda: command(*args, **options))

        def faulty_pipeline(**options: Any) -> Any:
            pipe = pipeline(**options)
            whole = pipe.execute

            async def execute(**options: Any) -> Any:
                return await self._many(pipe, lambda: whole(**options))

            pipe.execute = execute
            return pipe

        client.execute_command = execute_command
        client.pipeline = faulty_pipeline

    async def _one(self, args: tuple[Any, ...], send: Callable[[], Awaitable[Any]]) -> Any:
        await self._go_on()
        if not self._is_due(args):
            return await send()
        if self.fault in ("freezes before", "is not sent"):
            await self._meet()
            return await send()
        reply = await send()
        await self._meet()
        return reply

    async def _many(self, pipe: Any, send: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
        await self._go_on()
        commands: list[Any] = pipe.command_stack
        due = [self._is_due(args) for args, _ in commands]
        if True not in due:
            return await send()
        cut = due.index(True) + (self.fault in ("dies after", "freezes after", "loses its reply"))
        replies: list[Any] = []
        for part in (commands[:cut], commands[cut:]):
            pipe.command_stack = part
            replies += await send() if part else []
            if not self.reached.is_set():
                await self._meet()
        return replies

    def _is_due(self, args: tuple[Any, ...]) -> bool:
        if len(args) > 1 and args[1] in _UNCOUNTED:
            return False
        self.commands += 1
        return self.commands == self._at + 1

    async def _go_on(self) -> None:
        if self._stopped:
            await self._stopped.wait()

    async def _meet(self) -> None:
        """Inject the fault now. Returns when the worker continues after it."""
        if self.fault in ("is not sent", "loses its reply"):
            self.reached.set()
            raise ConnectionLost("the connection was cut, says the test")
        self._stopped = asyncio.Event()
        self.reached.set()
        if self.fault.startswith("dies"):
            self._dead.set()
        await self._stopped.wait()

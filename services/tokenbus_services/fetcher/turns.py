"""Runs turns: each item of the `turns` queue is one attempt of one run, many at once in one process.

An item that another worker held before is not tried again here: its attempt is closed as lost, and the parser decides
on the next one. So one attempt has one fetcher, ever.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.outage import outlast
from tokenbus.bus.queue import Item, Queue
from tokenbus.bus.server import Server
from tokenbus.errors import AttemptRefused, RequestError, SettingsError
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import Ended, Noted, TurnWork, history_decoder, turn_decoder
from tokenbus.events.requests import Generate, Message
from tokenbus_services.fetcher.call import fetch
from tokenbus_services.fetcher.providers import Endpoint, Providers
from tokenbus_services.fetcher.writer import AttemptWriter, RawWriter

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_request_decoder = msgspec.json.Decoder(Generate)


class _Running:
    """One attempt in this process."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.lost = False
        """The item is another worker's by now."""
        self.call: asyncio.Task[None] | None = None
        """What may be cancelled at any moment."""
        self.whole: asyncio.Task[None] | None = None
        """The call and what must follow it."""

    def stop(self) -> None:
        """Close the provider's socket, at once."""
        if self.call:
            self.call.cancel()


class Turns:
    """The attempts that this process runs. Give it items with `start`; `cancel` a run; `drain` and `stop` at the end."""

    def __init__(
        self, server: Server, keys: Keys, queue: Queue, writer: RawWriter, providers: Providers, *, most: int
    ) -> None:
        """``most``: attempts at once."""
        self._server = server
        self._keys = keys
        self._queue = queue
        self._writer = writer
        self._providers = providers
        self._room = asyncio.Semaphore(most)
        self._running: dict[str, _Running] = {}
        self._stopping = False

    @property
    def running(self) -> int:
        """Attempts in hand."""
        return len(self._running)

    async def room(self) -> None:
        """Wait until one more attempt may begin."""
        await self._room.acquire()
        self._room.release()

    async def start(self, item: Item) -> None:
        """Begin on an item, in a task of its own."""
        await self._room.acquire()
        running = self._running[item.entry_id] = _Running(item)
        running.call = asyncio.create_task(self._work(item), name=f"turn {item.entry_id}")
        running.whole = asyncio.create_task(self._see_through(running, running.call))

    def lost(self, item: Item) -> None:
        """Another worker took the item over: stop."""
        if running := self._running.get(item.entry_id):
            running.lost = True
            running.stop()

    def cancel(self, run: str) -> None:
        """The run was cancelled: close its socket."""
        for running in self._running.values():
            if run.encode() in running.item.fields:
                running.stop()

    async def drain(self, seconds: float) -> None:
        """Let what runs finish, for so long at the most."""
        if running := self._tasks():
            await asyncio.wait(running, timeout=seconds)

    async def stop(self) -> None:
        """Hand over what still runs: its attempts are closed as lost, for others to go on from."""
        self._stopping = True
        tasks = self._tasks()
        for running in self._running.values():
            running.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [r.whole for r in self._running.values() if r.whole]

    async def _see_through(self, running: _Running, call: asyncio.Task[None]) -> None:
        item = running.item
        try:
            await asyncio.wait({call})
            failed = not call.cancelled() and call.exception() is not None
            if failed:
                log.error("turn_failed", entry=item.entry_id, exc_info=call.exception())
            if failed or (self._stopping and call.cancelled()):
                for name, data in item.fields.items():
                    work = turn_decoder.decode(data)
                    await self._writer.lost(name.decode(), work.turn, work.attempt, "the fetcher stopped")
            # A lost item is not finished: who has it now may not have closed the attempt yet.
            if not running.lost:
                await self._queue.finish([item])
        finally:
            del self._running[item.entry_id]
            self._room.release()

    async def _work(self, item: Item) -> None:
        for name, data in item.fields.items():
            await self._attempt(name.decode(), turn_decoder.decode(data), item)

    async def _attempt(self, run: str, work: TurnWork, item: Item) -> None:
        if item.deliveries > 1:
            log.info("attempt_lost", run=run, turn=work.turn, attempt=work.attempt)
            await self._writer.lost(run, work.turn, work.attempt, "the fetcher was lost")
            return
        if work.not_before_ms:
            await asyncio.sleep(max(0.0, work.not_before_ms / 1000 - time.time()))
        found = await self._look_up(run, work)
        if found is None:
            return
        request, history, deadline_ms = found
        this = asyncio.current_task()
        assert this
        writer = self._writer.attempt(run, work.turn, work.attempt, lambda _: this.cancel())
        deadline = None
        if deadline_ms:
            deadline = asyncio.get_running_loop().time() + deadline_ms / 1000 - time.time()
        try:
            await self._call(request, history, writer, deadline)
        except AttemptRefused as e:
            log.info("attempt_refused", run=run, turn=work.turn, attempt=work.attempt, reason=e.reason)

    async def _call(
        self, request: Generate, history: list[Message], writer: AttemptWriter, deadline: float | None
    ) -> None:
        try:
            endpoint: Endpoint = self._providers.get(request.provider)
            built = endpoint.api.build(request, history, endpoint.settings.quirks)
        except (RequestError, SettingsError) as e:
            where = getattr(e, "where", None)
            await writer.end(Ended(ErrorInfo(code=e.code, kind="invalid_request", message=str(e), where=where)))
            return
        for note in built.notes:
            await writer.write(Noted(note))
        await fetch(endpoint, built.call, stream=request.stream, writer=writer, deadline=deadline)

    async def _look_up(self, run: str, work: TurnWork) -> tuple[Generate, list[Message], int] | None:
        """The request, what earlier turns appended, and the deadline; None where the attempt is over."""
        names = ["status", "attempt", "request", "deadline", *(f"history:{n}" for n in range(1, work.turn + 1))]
        values = await outlast(lambda: self._server.client.hmget(self._keys.run(run), names), what="look-up of a run")
        status, attempt, request, deadline, *turns = values
        if status != b"open" or int(attempt) != work.attempt or request is None:
            return None
        history = [m for t in turns if t for m in history_decoder.decode(t)]
        return _request_decoder.decode(request), history, int(deadline or 0)



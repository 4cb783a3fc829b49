"""Makes attempts: each item of the `turns` queue is one attempt of one run.

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
from tokenbus.bus.scripts.runs import so_far_field
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


class Turns:
    """Makes the attempts that items of the `turns` queue ask for."""

    def __init__(self, server: Server, keys: Keys, queue: Queue, writer: RawWriter, providers: Providers) -> None:
        self._server = server
        self._keys = keys
        self._queue = queue
        self._writer = writer
        self._providers = providers

    async def work(self, item: Item) -> None:
        """Make the attempt, to its end."""
        for name, data in item.fields.items():
            await self._attempt(name.decode(), turn_decoder.decode(data), item)

    async def abandon(self, item: Item) -> None:
        """Close the attempt as lost, for others to go on from."""
        for name, data in item.fields.items():
            work = turn_decoder.decode(data)
            await self._writer.lost(name.decode(), work.turn, work.attempt, "the fetcher stopped")
        await self._queue.finish([item])

    async def _attempt(self, run: str, work: TurnWork, item: Item) -> None:
        if item.deliveries > 1:
            log.info("attempt_lost", run=run, turn=work.turn, attempt=work.attempt)
            await self._writer.lost(run, work.turn, work.attempt, "the fetcher was lost")
            return
        found = await self._look_up(run, work)
        if found is None:
            return
        request, history, deadline_ms = found
        start_ms = min(work.not_before_ms, deadline_ms) if deadline_ms else work.not_before_ms
        await asyncio.sleep(max(0.0, start_ms / 1000 - time.time()))
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
            built = endpoint.build(request, history)
        except (RequestError, SettingsError) as e:
            where = getattr(e, "where", None)
            await writer.end(Ended(ErrorInfo(code=e.code, kind="invalid_request", message=str(e), where=where)))
            return
        for note in built.notes:
            await writer.write(Noted(note))
        await fetch(endpoint, built.call, stream=request.stream, writer=writer, deadline=deadline)

    async def _look_up(self, run: str, work: TurnWork) -> tuple[Generate, list[Message], int] | None:
        """The request, what earlier turns appended, and the deadline; None where the attempt is over."""
        names = ["status", "attempt", "request", "deadline", so_far_field(work.attempt)]
        names += [f"history:{n}" for n in range(1, work.turn + 1)]
        values = await outlast(lambda: self._server.client.hmget(self._keys.run(run), names), what="look-up of a run")
        status, attempt, request, deadline, so_far, *turns = values
        if status != b"open" or int(attempt) != work.attempt or request is None:
            return None
        history = [m for t in turns if t for m in history_decoder.decode(t)]
        if so_far is not None:
            history.append(Message(role="assistant", content=so_far.decode()))
        return _request_decoder.decode(request), history, int(deadline or 0)

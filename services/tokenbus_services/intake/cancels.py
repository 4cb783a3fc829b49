"""Applies cancels from the inbound stream as they are read, ahead of all waiting requests."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.layout import changed, locate
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.run_record import newest_seq
from tokenbus.bus.scripts.fair_order import URGENT_BYTES
from tokenbus.bus.scripts.runs.accept import STALE
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.core.request.parse import decode_request
from tokenbus.core.request.validate import check_heard
from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import CONTROL_ATTEMPT, CancelRequested, Control, EventFrame, encode
from tokenbus.events.requests import Cancel

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAYBE_CANCEL = re.compile(rb'"type\\?"\s*:\s*\\?"cancel|\xa4type\xa6cancel')
"""The same pattern as on the server (bus/scripts/pieces/look.lua)."""
AWAITED_MS = 60_000
"""How long a cancel waits for an unknown run: another fetcher may be accepting its request."""
AWAITED_MS_A_REQUEST = 100
"""Additional wait per request on the inbound stream, because the cancel may have overtaken all of them."""
AT_ONCE = 200
MOST_LEFT = 4 * AT_ONCE
CLOSE_S = 5.0


class Cancels:
    """Applies cancels concurrently with intake. Call `close` at the end."""

    def __init__(self, server: Server, keys: Keys, queue: WorkQueue, liveness: Liveness | None = None) -> None:
        self._server = server
        self._keys = keys
        self._queue = queue
        self._liveness = liveness or Liveness()
        self._read: defaultdict[int, list[tuple[QueueItem, Cancel]]] = defaultdict(list)
        """Cancels not sent yet. In a Cluster by partition: a node that is unavailable delays only its own."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._left_to_intake: deque[str] = deque(maxlen=MOST_LEFT)
        """Entry ids of cancels that were passed over here, so that intake reports what is wrong with each."""

    def take(self, item: QueueItem) -> bool:
        """Start applying and finishing the item if it is a valid cancel; return False if it is not."""
        if item.entry_id in self._left_to_intake:
            return False
        data = item.fields.get(DATA_FIELD.encode(), b"")
        if len(data) > URGENT_BYTES or not MAYBE_CANCEL.search(data):
            return False
        try:
            request = decode_request(item.fields)
        except Exception:
            return False  # intake reports what is wrong when it gets to it
        if not isinstance(request, Cancel):
            return False
        lane = self._keys.partition_of(request.run) if self._server.topology == "cluster" else 0
        self._read[lane].append((item, request))
        if lane not in self._tasks or self._tasks[lane].done():
            self._tasks[lane] = self._liveness.start_passing(self._apply_all(self._read[lane]), name="cancels")
        return True

    async def close(self) -> None:
        """Wait for cancels in progress, at most `CLOSE_S`; other workers claim the rest."""
        tasks = self._tasks.values()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def call(self, request: Cancel, awaited_ms: int = AWAITED_MS) -> scripts.ScriptCall:
        """Build the script call that applies a cancel."""
        keys, run = self._keys, request.run
        partition = keys.partition_of(run)
        now = self._server.clock.now_ms()
        cancel = CancelRequested(request.reason, request.heard_through, request.heard_characters)
        return scripts.cancel(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.topic(partition, "raw"),
            keys.topic(partition, "control"),
            parser_lease=keys.lease(partition, "parser"),
            normalizer_lease=keys.lease(partition, "normalizer"),
            run=run,
            awaited_ms=awaited_ms,
            frame=encode(EventFrame(0, CONTROL_ATTEMPT, now, [cancel])),
            control_frame=encode(Control(run)),
            epoch=keys.epoch,
        )

    async def check(self, request: Cancel) -> None:
        """Raise RequestInvalid if the run has no event as new as the one that its listener heard."""
        if request.heard_through is not None and request.heard_through >= 0:
            run_key = self._keys.run(request.run)
            newest = await retry_until_available(
                self._server, lambda: newest_seq(self._server.client, run_key), what="newest event of a run"
            )
            check_heard(request, newest)

    async def awaited_ms(self) -> int:
        """How long a cancel waits for its request, given the current length of the inbound stream."""
        requests = self._keys.requests
        waiting = await retry_until_available(
            self._server, lambda: self._server.client.xlen(requests), what="length of the inbound stream"
        )
        return AWAITED_MS + waiting * AWAITED_MS_A_REQUEST

    async def _apply_all(self, read: list[tuple[QueueItem, Cancel]]) -> None:
        while batch := read[:AT_ONCE]:
            del read[:AT_ONCE]
            items = [item for item, _ in batch]
            requests = [request for _, request in batch]
            try:
                try:
                    await self._apply(requests)
                except (RedisError, OSError, RequestInvalid) as e:
                    # One of them is at fault, for example a key of its run has the wrong type. Intake reports which
                    # one.
                    log.warning("cancels_skipped", cancels=len(items), error=str(e))
                    self._left_to_intake.extend(item.entry_id for item in items)
                    await self._queue.discard(items)
                else:
                    await self._queue.finish(items, again=lambda requests=requests: self._apply(requests))
            except Exception:  # any error: another fetcher gets them next, one by one (`Acceptance`), and a bounded
                # number of times
                log.exception("cancels_not_finished", cancels=len(items))
                self._liveness.failed_work("cancels")
                self._queue.release(items)

    async def _apply(self, requests: Sequence[Cancel]) -> None:
        epoch = self._keys.epoch
        await retry_until_available(
            self._server, lambda: locate(self._server, self._keys, *(r.run for r in requests)), what="runs to cancel"
        )
        for request in requests:
            await self.check(request)
        calls = [self.call(request) for request in requests]
        replies = await retry_until_available(self._server, lambda: run_scripts(self._server, calls), what="cancels")
        if stale := [request for request, reply in zip(requests, replies, strict=True) if reply == STALE]:
            await changed(self._keys, epoch)
            await self._apply(stale)
        unknown = [request for request, reply in zip(requests, replies, strict=True) if reply == b"awaited"]
        if unknown:
            awaited_ms = await self.awaited_ms()
            calls = [self.call(request, awaited_ms) for request in unknown]
            await retry_until_available(
                self._server, lambda: run_scripts(self._server, calls), what="cancels that wait for their run"
            )

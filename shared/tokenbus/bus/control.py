"""Broadcast listener: every worker reads all of `control` itself, without a consumer group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, beat, stop_task
from tokenbus.bus.server.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, Defects
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader
from tokenbus.events.frames import Control, control_decoder

log = logging.getLogger(__name__)

COUNT = 500


class ControlListener:
    """Calls ``on_message`` with every control message after `open`; misses none if the connection is lost."""

    def __init__(
        self, server: Server, keys: Keys, on_message: Callable[[Control], None], *, liveness: Liveness | None = None
    ) -> None:
        self._server = server
        self._streams = [keys.topic(p, "control") for p in range(keys.partitions)]
        self._on_message = on_message
        self._reader = StreamReader(server, count=COUNT)
        self._offsets: dict[str, str] = {}
        self._liveness = liveness or Liveness()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start at the current end of the streams. Raises redis-py's errors."""
        for stream in self._streams:
            last = await self._server.client.xrevrange(stream, count=1)
            self._offsets[stream] = last[0][0].decode() if last else "0-0"
        self._task = self._liveness.start(self._run(), name="control")

    async def add(self, keys: Keys) -> None:
        """Listen to the partitions of ``keys`` that were added too, from their beginning on."""
        streams = [keys.topic(p, "control") for p in range(keys.partitions)]
        new = [stream for stream in streams if stream not in self._streams]
        self._streams += new
        if self._task:
            self._offsets |= dict.fromkeys(new, "0-0")
            self._reader.wake()

    async def close(self) -> None:
        """Stop listening."""
        await stop_task(self._task)
        await self._reader.close()

    async def _run(self) -> None:
        pause, defects = FIRST_PAUSE_S, Defects()
        while True:
            beat()
            try:
                found = await self._reader.read(dict(self._offsets))
                pause = FIRST_PAUSE_S
                defects.none()
            except Exception as e:  # of any kind: a worker that misses messages would keep sockets of ended runs open
                if pause == FIRST_PAUSE_S:
                    log.warning("control is not read: %s", str(e) or type(e).__name__)
                defects.count(e)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
                continue
            for stream, entries in found:
                for entry_id, fields in entries:
                    self._offsets[stream] = entry_id.decode()
                    for frame in fields.values():
                        self._notify(stream, frame)

    def _notify(self, stream: str, frame: bytes) -> None:
        try:
            self._on_message(control_decoder.decode(frame))
        except Exception:  # one bad message must not stop the listener
            log.exception("control message of %s", stream)

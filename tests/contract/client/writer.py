"""Writes events of a run as the parser does: its log, the topics, the status in its hash."""

from __future__ import annotations

from typing import Any

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.server.server import Server
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    TERMINAL,
    BlockComplete,
    BlockStarted,
    Chunk,
    Completed,
    PublicEvent,
    Retrying,
    Started,
    Timing,
    encode,
)

LOST = ErrorInfo(code="worker_lost", kind="internal", message="", retryable=True)


class Writer:
    """One run. Each call is one transaction (one pipeline in a Cluster, where redis-py's transactions run in a thread
    of their own); what was written is in ``events``."""

    def __init__(self, server: Server, keys: Keys, run: str, *, topic_entries: int = 50_000) -> None:
        self.run = run
        self.log = keys.log(run)
        self.events: list[PublicEvent] = []
        self.attempt = 1
        self._server = server
        self._keys = keys
        self._most = topic_entries

    async def accept(self) -> None:
        """What intake writes: the run is known from here on."""
        pipe = self._server.client.pipeline(transaction=self._server.topology != "cluster")
        pipe.hset(self._keys.run(self.run), "status", "open")
        pipe.pexpire(self._keys.run(self.run), 60_000)
        await pipe.execute()

    async def start(self) -> None:
        """The run's first event."""
        await self.write((Started, {"provider": "p", "model": "m"}))

    async def say(self, *texts: str) -> None:
        """A visible chunk for each text."""
        await self.write(*((Chunk, _chunk(text)) for text in texts))

    async def retry(self) -> None:
        """The attempt failed; the next one begins."""
        error: dict[str, Any] = {"error": LOST, "next_attempt": self.attempt + 1, "delay_ms": 0, "drop_from": 0}
        await self.write((Retrying, error))
        self.attempt += 1

    async def block(self, content: str) -> None:
        """A whole text block."""
        about = {"block": 0, "kind": "text"}
        await self.write(
            (BlockStarted, about), (Chunk, _chunk(content)), (BlockComplete, {**about, "content": content})
        )

    async def complete(self) -> None:
        """The terminal event."""
        await self.write((Completed, {"finish": "stop", "timing": Timing(total_ms=1)}))

    async def write(self, *events: tuple[type[PublicEvent], dict[str, Any]]) -> None:
        """Any events, in one transaction."""
        pipe = self._server.client.pipeline(transaction=self._server.topology != "cluster")
        for kind, fields in events:
            event = kind(run=self.run, seq=len(self.events), turn=0, attempt=self.attempt, **fields)
            self.events.append(event)
            data = encode(event)
            pipe.xadd(self.log, {"__data__": data}, id=f"{event.attempt}-{event.seq}")
            for topic in _topics(event):
                stream = self._keys.topic(self._keys.partition_of(self.run), topic)
                pipe.xadd(stream, {"__data__": data}, maxlen=self._most, approximate=False)
            if isinstance(event, TERMINAL):
                pipe.hset(self._keys.run(self.run), "status", "completed")
                pipe.pexpire(self._keys.run(self.run), 60_000)
        pipe.pexpire(self.log, 60_000)
        await pipe.execute()


def _chunk(text: str) -> dict[str, Any]:
    return {"block": 0, "kind": "text", "text": text, "visible": True, "depth": 0}


def _topics(event: PublicEvent) -> tuple[PublicTopic, ...]:
    match event:
        case Chunk():
            return ("visible", "chunks")
        case BlockStarted() | BlockComplete():
            return ("blocks",)
        case _:
            return ("runs",)

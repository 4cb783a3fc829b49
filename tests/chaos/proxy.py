"""A TCP proxy that breaks connections in every way that a network does."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from types import TracebackType
from typing import Literal, Self

Way = Literal["up", "down"]
"""`up`: what the client sends; `down`: what comes back."""
_READ_BYTES = 64 * 2**10


class Link:
    """One connection through the proxy, and what is wrong with it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._ends: dict[Way, asyncio.StreamWriter] = {"up": server, "down": client}
        self._gates: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._doomed: dict[Way, float] = {}
        self.silent = False
        """Half open: what comes is taken and goes nowhere."""
        for gate in self._gates.values():
            gate.set()

    def hold(self, way: Way) -> None:
        """Nothing passes this way until `let`."""
        self._gates[way].clear()

    def let(self, way: Way) -> None:
        """All passes again."""
        self._gates[way].set()

    def doom(self, way: Way, part: float) -> None:
        """Of the next bytes this way only the first ``part`` (0 to 1) pass; then the connection is reset."""
        self._doomed[way] = part

    def reset(self) -> None:
        """Break both ends off, now."""
        for way, writer in self._ends.items():
            if not writer.transport.is_closing():
                end: socket.socket = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            self._gates[way].set()

    def close(self) -> None:
        """Close both ends, once what is written is sent."""
        for writer in self._ends.values():
            writer.close()

    async def pump(self, reader: asyncio.StreamReader, way: Way) -> None:
        """Pass bytes on, to the end of the connection."""
        writer = self._ends[way]
        while data := await reader.read(_READ_BYTES):
            await self._gates[way].wait()
            if self.silent:
                continue
            if (part := self._doomed.get(way)) is not None:
                writer.write(data[: int(part * len(data))])
                await writer.drain()
                self.reset()
                return
            writer.write(data)
            await writer.drain()


class Proxy:
    """Between clients that connect to `port` and a server on this machine. A context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusing = False
        """New connections are reset at once."""

    @property
    def port(self) -> int:
        """Where clients connect. Only while the proxy runs."""
        assert self._listener
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._links)

    def some(self, chance: random.Random, share: float) -> list[Link]:
        """About this share of the open connections, at least one where there is any."""
        links = list(self._links)
        return chance.sample(links, max(1, round(share * len(links)))) if links else []

    def reset_all(self) -> None:
        """Break all connections off."""
        for link in list(self._links):
            link.reset()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=512)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener
        self._listener.close()
        self.reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self.refusing:
            client.transport.abort()
            return
        try:
            server_reader, server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            client.transport.abort()
            return
        link = Link(client, server)
        self._links.add(link)
        pumps = (
            asyncio.create_task(link.pump(client_reader, "up")),
            asyncio.create_task(link.pump(server_reader, "down")),
        )
        try:
            # An end of either side is the end of both: neither HTTP/1.1 nor RESP goes on half closed.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            link.close()
            self._links.discard(link)

"""A TCP proxy that breaks connections in the ways in which networks do."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from types import TracebackType
from typing import Literal, Self

from tests.chaos.deployment import resp

Way = Literal["up", "down"]
"""`up`: what the client sends; `down`: what the server sends."""
_READ_BYTES = 64 * 2**10


class Link:
    """One connection through the proxy, and its current fault."""

    def __init__(self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._ends: dict[Way, asyncio.StreamWriter] = {"up": server, "down": client}
        self._gates: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._cuts: dict[Way, float] = {}
        self.silent = False
        """Half open: bytes are read and discarded."""
        self._refusal: tuple[bytes, bool] | None = None
        self._commands = b""
        """Bytes received so far of the commands that are being refused."""
        self._owed = 0
        """Number of the server's replies to drop."""
        self._replies = b""
        self._last: Way = "down"
        for gate in self._gates.values():
            gate.set()

    def hold(self, way: Way) -> None:
        """Let nothing pass in this direction until `release`."""
        self._gates[way].clear()

    def release(self, way: Way) -> None:
        """Let everything pass again."""
        self._gates[way].set()

    def cut(self, way: Way, part: float) -> None:
        """Of the next bytes in this direction let only the first ``part`` (0 to 1) pass; then reset the connection."""
        self._cuts[way] = part

    def refuse(self, error: str, *, done: bool) -> None:
        """Answer the next command, or pipeline of commands, with this error, as a proxy between Redis and its clients
        does. ``done``: the server executes it, and its reply is lost; otherwise the server never receives it.
        """
        self._refusal = f"-{error}\r\n".encode(), done

    def reset(self) -> None:
        """Reset both sides now."""
        for way, writer in self._ends.items():
            if not writer.transport.is_closing():
                end: socket.socket = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            self._gates[way].set()

    def close(self) -> None:
        """Close both sides after what is written has been sent."""
        for writer in self._ends.values():
            writer.close()

    async def pump(self, reader: asyncio.StreamReader, way: Way) -> None:
        """Pass bytes on until the connection ends."""
        writer = self._ends[way]
        while data := await reader.read(_READ_BYTES):
            await self._gates[way].wait()
            if self.silent:
                continue
            if self._refusal and (answer := self._instead(data, way)) is not None:
                for end, answered in answer:
                    self._ends[end].write(answered)
                    await self._ends[end].drain()
                continue
            if way == "up" and self._last == "down" and self._proxy.round_trip_s:
                await asyncio.sleep(self._proxy.round_trip_s)
            self._last = way
            if (part := self._cuts.get(way)) is not None:
                writer.write(data[: int(part * len(data))])
                await writer.drain()
                self.reset()
                return
            writer.write(data)
            await writer.drain()

    def _instead(self, data: bytes, way: Way) -> list[tuple[Way, bytes]] | None:
        """What to write in place of these bytes, and to which side; None if they belong to no command that is to be
        refused.

        A client sends its next command only after it has read the whole reply to the last one. So bytes from the client
        after bytes from the server are the beginning of a command.
        """
        assert self._refusal
        error, done = self._refusal
        if way == "down":
            if not self._owed:
                return None
            self._replies += data
            if (resp.count(self._replies) or 0) < self._owed:
                return []
            answer = error * self._owed
            self._owed, self._replies, self._refusal = 0, b"", None
            return [("down", answer)]
        if self._owed or (not self._commands and self._last == "up"):
            return None
        self._commands += data
        count = resp.count(self._commands)
        if count is None:
            return []
        commands, self._commands = self._commands, b""
        if done:
            self._owed = count
            return [("up", commands)]
        self._refusal = None
        return [("down", error * count)]


class Proxy:
    """A proxy between clients that connect to `port` and a server on this machine. A context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusing = False
        """New connections are reset at once."""
        self.round_trip_s = 0.0
        """Each command reaches the server this much later: the server is far away."""

    @property
    def port(self) -> int:
        """The port for clients. Valid only while the proxy runs."""
        assert self._listener
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._links)

    def some(self, chance: random.Random, share: float) -> list[Link]:
        """About this share of the open connections; at least one if any is open."""
        links = list(self._links)
        return chance.sample(links, max(1, round(share * len(links)))) if links else []

    def reset_all(self) -> None:
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
        link = Link(self, client, server)
        self._links.add(link)
        pumps = (
            asyncio.create_task(link.pump(client_reader, "up")),
            asyncio.create_task(link.pump(server_reader, "down")),
        )
        try:
            # The end of either side ends both: neither HTTP/1.1 nor RESP continues half closed.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            link.close()
            self._links.discard(link)

"""One connection of the HTTP library over asyncio's own transports.

httpcore's connections go through anyio, which pauses and resumes the transport around every read and enters three
contexts for it: 60 µs of CPU for a wake-up that reads one event. This one waits for one future. What a peer can do
raises the same errors as there: tests/services/net/test_connection.py compares both.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, cast

import httpcore

from tokenbus.bus import process_clock

READ_AHEAD_BYTES = 64 * 1024
"""Bytes that may wait for a read; beyond that the socket is not read."""
_EXTRAS = {"ssl_object": "ssl_object", "socket": "socket", "client_addr": "sockname", "server_addr": "peername"}

SocketOptions = Iterable[tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]]


class Backend(httpcore.AsyncNetworkBackend):
    """Opens connections with limited response heads, over TCP alone."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions | None = None,
    ) -> Connection:
        connection = Connection()
        try:
            async with process_clock.timeout(timeout):
                sock = await open_socket(host, port, local_address)
                try:
                    for option in socket_options or ():
                        sock.setsockopt(*cast(Any, option))
                    await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError as e:
            raise httpcore.ConnectTimeout(str(e)) from e
        except OSError as e:
            raise httpcore.ConnectError(str(e)) from e
        if connection.is_closed:
            raise httpcore.ConnectError("the connection was reset while connecting")
        return connection

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Connection(httpcore.AsyncNetworkStream, asyncio.Protocol):
    """A connection; response heads that exceed a limit raise HeadRefused. For one reader and one writer at a time."""

    def __init__(self) -> None:
        self.at_body = False
        """Whether the last read ended with a response's head, so that the next one begins with its body."""
        self._bound = HeadBound()
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._size = 0
        self._ended = False
        """Nothing more will be received."""
        self._lost = False
        self._error: Exception | None = None
        self._paused = False
        self._reader: asyncio.Future[None] | None = None
        self._full = False
        """Whether the transport still holds what was written."""
        self._writer: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._lost or self._transport is None or self._transport.is_closing()

    @property
    def waiting_bytes(self) -> int:
        """How much waits for a read."""
        return self._size

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has arrived, at most ``max_bytes``, up to the end of a head; empty at the end.

        Raises httpcore's ReadTimeout, ReadError, HeadRefused.
        """
        self.at_body = False
        if not self._size:
            await self._wait(timeout)
        data = self._take(max_bytes)
        if data and self._bound.is_open:
            head = self._bound.feed(data)
            if head < len(data):
                self.unread(data[head:])
                data = data[:head]
            self.at_body = not self._bound.is_open
        return data

    def unread(self, data: bytes) -> None:
        """Put back data: the next read begins with it."""
        if data:
            self._received.insert(0, data)
            self._size += len(data)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Raises httpcore's WriteTimeout, WriteError."""
        if not buffer:
            return
        self._bound.begin()
        self.at_body = False
        transport = self._transport
        if transport is None or self.is_closed:
            raise httpcore.WriteError(str(self._error or "the connection is closed")) from self._error
        try:
            transport.write(buffer)
        except RuntimeError as e:  # uvloop, if the peer has reset the connection
            raise httpcore.WriteError(str(e)) from e
        if not self._full:
            return
        self._writer = asyncio.get_running_loop().create_future()
        try:
            async with process_clock.timeout(timeout):
                await self._writer
        except TimeoutError as e:
            raise httpcore.WriteTimeout(str(e)) from e
        finally:
            self._writer = None
        if self._lost:
            raise httpcore.WriteError(str(self._error or "the connection is closed")) from self._error

    async def aclose(self) -> None:
        if self._transport and not self._lost:
            self._ended = True
            self._transport.abort()  # a TLS connection would wait for its peer
            await asyncio.sleep(0)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> Connection:
        inner = Connection()
        assert self._transport
        try:
            async with process_clock.timeout(timeout):
                transport = await asyncio.get_running_loop().start_tls(
                    self._transport, inner, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError as e:
            await self.aclose()
            raise httpcore.ConnectTimeout(str(e)) from e
        except OSError as e:  # ssl.SSLError is one
            await self.aclose()
            raise httpcore.ConnectError(str(e)) from e
        except BaseException:
            await self.aclose()
            raise
        if transport is None:
            raise httpcore.ConnectError("the connection was closed in the TLS handshake")
        inner.connection_made(transport)
        return inner

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # called for an idle connection that is no longer usable
            return bool(self._size or self._ended or self._lost)
        name = _EXTRAS.get(info)
        return self._transport.get_extra_info(name) if self._transport and name else None

    async def _wait(self, timeout: float | None) -> None:
        if self._paused and self._transport and not self._lost:
            self._paused = False
            self._transport.resume_reading()
        if self._ended:
            if self._error:
                raise httpcore.ReadError(str(self._error)) from self._error
            return
        self._reader = asyncio.get_running_loop().create_future()
        try:
            if timeout is None:
                await self._reader
            else:
                async with process_clock.timeout(timeout):
                    await self._reader
        except TimeoutError as e:
            raise httpcore.ReadTimeout(str(e)) from e
        finally:
            self._reader = None
        if not self._size and self._error:
            raise httpcore.ReadError(str(self._error)) from self._error

    def _take(self, most: int) -> bytes:
        received = self._received
        if not received:
            return b""
        data = received[0] if len(received) == 1 else b"".join(received)
        received.clear()
        self._size = 0
        if len(data) > most:
            self.unread(data[most:])
            data = data[:most]
        return data

    # What follows is called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # a large body is read only as fast as the peer takes it
        if self._size > READ_AHEAD_BYTES:
            self._pause()

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if self._size > READ_AHEAD_BYTES and not self._paused and self._transport:
            self._pause()
        self._wake_reader()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake_reader()
        # A peer may close its side early and still read the request. TLS knows no such thing.
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = self._lost = True
        self._error = exc
        self._full = False
        self._wake_reader()
        self._wake_writer()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake_writer()

    def _pause(self) -> None:
        assert self._transport
        self._paused = True
        self._transport.pause_reading()

    def _wake_reader(self) -> None:
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writer(self) -> None:
        if self._writer and not self._writer.done():
            self._writer.set_result(None)


# Limits response heads before the HTTP library parses them: number of headers and of interim responses.
#
# The library limits only a head's bytes. 100 KB hold 25,000 headers, and interim responses (1xx) may repeat without
# end. Parsing either blocks all other calls of the process.

MAX_HEADERS = 256
"""Maximum headers of one response. Providers send 20 to 60."""
MAX_INTERIM = 16
"""Maximum interim responses before the final one."""

_END = re.compile(rb"\n\r?\n")
_STATUS = len(b"HTTP/1.1 ")


class HeadRefused(httpcore.RemoteProtocolError):
    """A response head exceeds a limit."""


class HeadBound:
    """Checks the response heads of one connection. Call `begin` with each request and `feed` with all data read."""

    def __init__(self) -> None:
        self._head: bytearray | None = None
        self._interim = 0

    def begin(self) -> None:
        """Expect a response."""
        self._head = bytearray()
        self._interim = 0

    @property
    def is_open(self) -> bool:
        """Whether the response's head has not ended."""
        return self._head is not None

    def feed(self, data: bytes) -> int:
        """Check data that was read; return how much of it belongs to heads. Raises HeadRefused."""
        if self._head is None:
            return 0
        before = len(self._head)
        self._head += data
        while len(self._head) > _STATUS:
            end = _END.search(self._head)
            if self._head.count(b"\n", 0, end.end() if end else len(self._head)) > MAX_HEADERS + 2:
                raise HeadRefused(f"over {MAX_HEADERS} headers")
            if not self._head.startswith(b"1", _STATUS):
                if end:
                    self._head = None
                    return max(0, end.end() - before)
                break
            if end is None:
                break
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise HeadRefused(f"over {MAX_INTERIM} interim responses")
            del self._head[: end.end()]
            before -= end.end()
        return len(data)


# Connects to the first address of a host that answers (RFC 8305, "Happy Eyeballs").
#
# uvloop tries one address after the other, each for as long as the system does: minutes, if IPv6 leads nowhere.

DELAY_S = 0.25
"""How long an address is tried alone before the next one is tried in parallel."""
_Address = tuple[socket.AddressFamily, Any]


async def open_socket(host: str, port: int, local_address: str | None = None) -> socket.socket:
    """Return a connected, non-blocking TCP socket. Raises OSError, without any address in its text."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # not an address, so a name
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = by_turns([(family, address) for family, _, _, _, address in found])
    if len(addresses) == 1:
        return await _open(addresses[0], local_address)
    return await _first(addresses, local_address)


def by_turns(addresses: Sequence[_Address]) -> list[_Address]:
    """Return the addresses with both families in turn, beginning with that of the first."""
    first = [each for each in addresses if each[0] == addresses[0][0]]
    others = [each for each in addresses if each[0] != addresses[0][0]]
    return [each for each in chain.from_iterable(zip_longest(first, others)) if each]


async def _first(addresses: Sequence[_Address], local_address: str | None) -> socket.socket:
    to_try = iter(addresses)
    trying: set[asyncio.Task[socket.socket]] = set()
    opened: list[socket.socket] = []
    error: BaseException | None = None
    try:
        while not opened:
            if address := next(to_try, None):
                trying.add(asyncio.create_task(_open(address, local_address)))
            elif not trying:
                raise error or OSError("the host has no address")
            timeout_s = DELAY_S if address else None
            done, trying = await asyncio.wait(trying, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    opened.append(task.result())
                else:
                    error = error or task.exception()
        return opened.pop(0)
    finally:
        for task in trying:
            task.cancel()
        late = await asyncio.gather(*trying, return_exceptions=True)
        for sock in (*opened, *(each for each in late if isinstance(each, socket.socket))):
            sock.close()


async def _open(address: _Address, local_address: str | None) -> socket.socket:
    family, target = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if local_address is not None:
            sock.bind((local_address, 0))
        await asyncio.get_running_loop().sock_connect(sock, target)
    except OSError as e:
        sock.close()
        if e.errno is None or isinstance(e, TimeoutError):
            raise
        # asyncio names the address here, which no answer to a user should.
        raise type(e)(e.errno, os.strerror(e.errno)) from e
    except BaseException:
        sock.close()
        raise
    return sock

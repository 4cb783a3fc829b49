"""One connection over asyncio's own transports: bytes in, bytes out, bounded in memory, for one user at a time.

Nothing else stands between a socket and an HTTP answer (http_client.py), because reading one event is most of what an
open stream costs: one future and one call, instead of the contexts that anyio and httpcore enter for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, cast

import httpx

from tokenbus.bus import process_clock

READ_AHEAD_BYTES = 64 * 1024
"""Bytes that may wait for a read; beyond that the socket is not read."""
READ_BYTES = 64 * 1024
"""Maximum size of one read: thousands of chunks of one byte each must not hold up the others."""


class Connection(asyncio.Protocol):
    """A connection that is read or written, never both at once."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "_error",
        "_full",
        "_lost",
        "_paused",
        "_received",
        "_size",
        "_transport",
        "_waiter",
        "expiry",
    )

    def __init__(self) -> None:
        self.expiry: asyncio.TimerHandle | None = None
        """Closes it, while it is idle."""
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._size = 0
        self._ended = False
        """Nothing more will be received."""
        self._lost = False
        self._error: Exception | None = None
        self._paused = False
        self._full = False
        """Whether the transport still holds what was written."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._lost or self._transport is None or self._transport.is_closing()

    @property
    def is_silent(self) -> bool:
        """Whether it is open, and nothing was received that was not read: a request may be sent."""
        return not (self._size or self._ended or self.is_closed)

    @property
    def waiting_bytes(self) -> int:
        """How much waits for a read."""
        return self._size

    async def read(self, timeout: float | None = None) -> bytes:
        """Return what has arrived, at most `READ_BYTES`; empty at the end.

        Raises httpx.ReadTimeout, httpx.ReadError.
        """
        if not self._size and not self._ended:
            if self._paused and self._transport:
                self._paused = False
                self._transport.resume_reading()
            try:
                if timeout is None:
                    while not self._size and not self._ended:
                        await self._change()
                else:
                    async with process_clock.timeout(timeout):
                        while not self._size and not self._ended:
                            await self._change()
            except TimeoutError as e:
                raise httpx.ReadTimeout(f"nothing was received in {timeout:g} s") from e
        if not self._received:
            if self._error:
                raise httpx.ReadError(str(self._error)) from self._error
            return b""
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        self._received.clear()
        self._size = 0
        if len(data) > READ_BYTES:
            self.unread(data[READ_BYTES:])
            data = data[:READ_BYTES]
        return data

    def unread(self, data: bytes) -> None:
        """Put back data: the next read begins with it."""
        if data:
            self._received.insert(0, data)
            self._size += len(data)

    async def write(self, data: bytes, timeout: float | None = None) -> None:
        """Send it, no faster than the peer takes it. Raises httpx.WriteTimeout, httpx.WriteError."""
        try:
            if self._transport and not self.is_closed:
                self._transport.write(data)
                if self._full:
                    async with process_clock.timeout(timeout):
                        while self._full and not self._lost:
                            await self._change()
                if not self._lost:
                    return
        except TimeoutError as e:
            raise httpx.WriteTimeout(f"nothing was taken in {timeout:g} s") from e
        except RuntimeError as e:  # uvloop, if the peer has reset the connection
            raise httpx.WriteError(str(e)) from e
        raise httpx.WriteError(str(self._error or "the connection is closed")) from self._error

    async def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Go on over TLS with this host. Raises OSError, of which ssl.SSLError is one."""
        assert self._transport
        transport = await asyncio.get_running_loop().start_tls(self._transport, self, context, server_hostname=host)
        if transport is None:
            raise ConnectionResetError("the connection was closed in the TLS handshake")
        self.connection_made(transport)

    def close(self) -> None:
        """Close it at once, whatever is still to be sent or received."""
        self._ended = True
        if self._transport and not self._lost:
            self._transport.abort()  # a TLS connection would wait for its peer

    def _change(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _changed(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    # What follows is called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # a large body is read only as fast as the peer takes it

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if self._size > READ_AHEAD_BYTES and not self._paused and self._transport:
            self._paused = True
            self._transport.pause_reading()
        self._changed()

    def eof_received(self) -> bool:
        self._ended = True
        self._changed()
        # A peer may close its side early and still read the request. TLS knows no such thing.
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = self._lost = True
        self._error = exc
        self._full = False
        self._changed()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._changed()


async def connect(hosts: Sequence[str], port: int) -> Connection:
    """A connection to the first of these names or addresses that answers. Raises OSError."""
    connection = Connection()
    sock = await open_socket(hosts, port)
    try:
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
    except BaseException:
        sock.close()
        raise
    if connection.is_closed:
        raise ConnectionResetError("the connection was reset while connecting")
    return connection


# Connects to the first address of a host that answers (RFC 8305, "Happy Eyeballs").
#
# uvloop tries one address after the other, each for as long as the system does: minutes, if IPv6 leads nowhere.

DELAY_S = 0.25
"""How long an address is tried alone before the next one is tried in parallel."""
_Address = tuple[socket.AddressFamily, Any]


async def open_socket(hosts: Sequence[str], port: int) -> socket.socket:
    """Return a connected, non-blocking TCP socket. Raises OSError, without any address in its text."""
    addresses = by_turns([address for host in hosts for address in await _addresses(host, port)])
    return await (_open(addresses[0]) if len(addresses) == 1 else _first(addresses))


async def _addresses(host: str, port: int) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # not an address, so a name
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def by_turns(addresses: Sequence[_Address]) -> list[_Address]:
    """Return the addresses with both families in turn, beginning with that of the first."""
    first = [each for each in addresses if each[0] == addresses[0][0]]
    others = [each for each in addresses if each[0] != addresses[0][0]]
    return [each for each in chain.from_iterable(zip_longest(first, others)) if each]


async def _first(addresses: Sequence[_Address]) -> socket.socket:
    to_try = iter(addresses)
    trying: set[asyncio.Task[socket.socket]] = set()
    opened: list[socket.socket] = []
    error: BaseException | None = None
    try:
        while not opened:
            if address := next(to_try, None):
                trying.add(asyncio.create_task(_open(address)))
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


async def _open(address: _Address) -> socket.socket:
    family, target = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

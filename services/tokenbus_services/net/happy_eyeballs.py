"""Connects to the first address of a host that answers (RFC 8305, "Happy Eyeballs").

uvloop tries one address after the other, each for as long as the system does: minutes, if IPv6 leads nowhere.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

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

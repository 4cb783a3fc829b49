"""Handles connections that are reset while they are being established, for httpx's own transport: a SOCKS proxy's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import httpx


@contextmanager
def reset_as_made(request: httpx.Request) -> Generator[None]:
    """Wrap the sending of a request over httpx. Raises httpx.ConnectError if the connection was reset while connecting.

    uvloop has already dropped the socket when anyio asks for its peer name, which raises an AttributeError instead of a
    network error (similar: MagicStack/uvloop#560).
    """
    try:
        yield
    except AttributeError as e:
        if e.name != "getpeername":
            raise
        raise httpx.ConnectError("the connection was reset while connecting", request=request) from e

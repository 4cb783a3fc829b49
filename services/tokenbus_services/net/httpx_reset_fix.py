"""Connections that are gone as soon as they are made."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import httpx


@contextmanager
def reset_as_made(request: httpx.Request) -> Generator[None]:
    """While a request is sent over httpx. Raises httpx.ConnectError for a connection that was reset as it was made.

    uvloop has no socket of it any more, and anyio asks that whose peer it is: an AttributeError, which is no error of a
    network to anybody (alike: MagicStack/uvloop#560).
    """
    try:
        yield
    except AttributeError as e:
        if e.name != "getpeername":
            raise
        raise httpx.ConnectError("the connection was reset as it was made", request=request) from e

"""The probe of a page: every fault of the peer is one of two errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenbus_services.cli.http_probe import probe


async def test_a_connection_that_is_reset_before_the_request_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop raises RuntimeError then. `tokenbus worker` would never print that it is ready."""

    class Writer:
        def write(self, data: bytes) -> None:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

        def close(self) -> None:
            pass

    async def opened(*_: Any, **__: Any) -> tuple[None, Writer]:
        return None, Writer()

    monkeypatch.setattr(asyncio, "open_connection", opened)
    with pytest.raises(ConnectionResetError, match="the handler is closed"):
        await probe("http://127.0.0.1:1/ready")

"""Errors of redis-py that are none of its own, as a lost connection."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tokenbus.bus.server.connection_fixes import prompt


class _Sends:
    """A connection whose write raises."""

    socket_timeout = None

    def __init__(self, writer: object) -> None:
        self._writer = writer

    async def send_packed_command(self, command: object, check_health: bool = True) -> None:
        raise AttributeError("'NoneType' object has no attribute 'writelines'")


async def test_a_write_to_a_connection_that_another_task_has_closed_is_a_lost_connection() -> None:
    closed: Any = prompt(_Sends)(None)
    with pytest.raises(ConnectionLost, match="closed while a command"):
        await closed.send_packed_command(b"PING")


async def test_another_attribute_error_stays_a_defect() -> None:
    opened: Any = prompt(_Sends)(object())
    with pytest.raises(AttributeError):
        await opened.send_packed_command(b"PING")

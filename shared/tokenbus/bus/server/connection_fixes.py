"""Fixes for behaviours of redis-py and uvloop that break workers.

On Python 3.11 redis-py may swallow the cancellation of a task. It writes each command under `asyncio.wait_for`, which
before Python 3.12 returns the result and drops the cancellation if both occur at once
(https://github.com/python/cpython/issues/86296); the task then runs forever. `wait_for` also creates a task per
command, on the hot path. `asyncio.timeout` does neither.

Each command is a `beat` of its task, also those that set up a connection and those of a pipeline: at a slow server one
call of redis-py may need several answers.

uvloop raises a plain RuntimeError for a write to a transport that the peer has reset, while asyncio silently drops the
bytes. Here it becomes a ConnectionError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import beat


@cache
def prompt(kind: Any) -> type[Any]:
    """redis-py's connection class ``kind``, with its write timeout implemented by `asyncio.timeout`."""

    class Prompt(kind):
        socket_timeout: float | None
        _writer: Any

        async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
            beat()
            limit, self.socket_timeout = self.socket_timeout, None
            try:
                async with asyncio.timeout(limit):
                    await kind.send_packed_command(self, command, check_health)
            except TimeoutError as e:  # redis-py's own type, by which its Cluster client recognises a failing node
                raise NoReply("the server takes nothing") from e
            except RuntimeError as e:  # redis-py has closed the connection by now
                raise ConnectionLost(str(e)) from e
            except AttributeError as e:  # another task closed it while this one connected: redis-py has no writer
                if self._writer is not None:
                    raise
                raise ConnectionLost("the connection was closed while a command was sent") from e
            finally:
                self.socket_timeout = limit

    return Prompt

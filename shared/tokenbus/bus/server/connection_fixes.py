"""Two ways of redis-py's and uvloop's that no worker can live with.

On Python 3.11 redis-py may swallow the cancellation of a task. It writes each command under `asyncio.wait_for`. Before
Python 3.12 that returns the result, and forgets the cancellation, where both come at once
(https://github.com/python/cpython/issues/86296): the task then goes on for ever. It also starts a task a command, on
the hot path. `asyncio.timeout` does neither.

And uvloop raises a plain RuntimeError for a write to a transport that the other side has reset by then, where asyncio
drops the bytes in silence. Here it is what it means: a lost connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as NoReply


@cache
def prompt(kind: Any) -> type[Any]:
    """redis-py's connection class of this kind, with the limit on its writes kept in another way."""

    class Prompt(kind):
        socket_timeout: float | None

        async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
            limit, self.socket_timeout = self.socket_timeout, None
            try:
                async with asyncio.timeout(limit):
                    await kind.send_packed_command(self, command, check_health)
            except TimeoutError as e:  # with redis-py's name, by which its Cluster client knows a failing node
                raise NoReply("the server takes nothing") from e
            except RuntimeError as e:  # redis-py has closed the connection on its way here
                raise ConnectionLost(str(e)) from e
            finally:
                self.socket_timeout = limit

    return Prompt

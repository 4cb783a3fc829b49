"""Retries for a server that is unavailable, restarting, failing over or full: repeat the command until the server
answers.

A command that itself causes the failure must not block its queue forever. It may be too large and break every
connection, or something between here and the server may answer with an unknown error. Such a command fails while the
server answers others, so it is tried a bounded number of times, and then its caller isolates it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import MAX_DEFECTS, beat
from tokenbus.bus.server.error_replies import is_final, may_pass
from tokenbus.bus.server.server import Server

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
"""Short enough that a worker continues within a second of its server's return."""
MAX_TRIES = 12
"""Tries of a command that fails while the server answers others: about 4 s. More tries block the queue longer; with
fewer, a network that breaks many connections is sooner mistaken for a fault of the command.
"""
ISOLATED_TRIES = 6
"""The same for a part of a command that has been tried that often already."""
TRIES_WITHOUT_REPLY = 3
"""A try without a reply takes seconds and counts as this many tries."""
LOG_EVERY_S = 30.0


class Defects:
    """Counts consecutive failed iterations of a loop that were not caused by the server.

    A loop that only fails does no work, although it keeps running.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def none(self) -> None:
        """Record a successful iteration."""
        self._in_a_row = 0

    def count(self, error: Exception) -> None:
        """Record a failed iteration. Raises the error after `MAX_DEFECTS` in a row, which ends the loop's task."""
        if isinstance(error, RedisError | OSError):
            return
        self._in_a_row += 1
        if self._in_a_row >= MAX_DEFECTS:
            raise error


async def retry_until_available(
    server: Server,
    attempt: Callable[[], Awaitable[T]],
    *,
    what: str,
    stop_if: Callable[[], bool] | None = None,
    tries: int = MAX_TRIES,
) -> T:
    """Retry ``attempt`` until the server accepts it. Use only for idempotent calls.

    Raises redis-py's errors: at once if a retry cannot help; after ``tries`` failures while the server answered other
    commands, because the call itself is at fault then; and once ``stop_if`` returns True. Logs the first error of each
    outage with ``what``, then one every `LOG_EVERY_S`.
    """
    loop = asyncio.get_running_loop()
    pause, at_fault, say_at = FIRST_PAUSE_S, 0, 0.0
    while True:
        beat()
        try:
            return await attempt()
        except (RedisError, OSError) as e:
            if is_final(e) or (stop_if and stop_if()):
                raise
            if not may_pass(e):
                if await server.answers():
                    at_fault += TRIES_WITHOUT_REPLY if isinstance(e, NoReply) else 1
                else:
                    at_fault = 0
            if at_fault >= tries:
                log.error("%s: given up, for the server answers others: %s", what, str(e) or type(e).__name__)
                raise
            if loop.time() >= say_at:
                say_at = loop.time() + LOG_EVERY_S
                log.warning("%s: trying again until the server takes it: %s", what, str(e) or type(e).__name__)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

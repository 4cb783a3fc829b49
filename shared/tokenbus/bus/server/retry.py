"""Retries for a server that is unavailable, restarting, failing over or full: repeat the command until the server
answers.

A command that itself causes the failure must not block its queue forever. It may be too large and break every
connection, or something between here and the server may answer with an unknown error. Such a command fails while the
server answers others, so it is tried a bounded number of times, and then its caller isolates it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import MAX_DEFECTS, beat, stop_task, wait_briefly
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
LOOK_S = 0.5
PROMPT_S = 1.0
"""A command is at fault for having no reply only if the server answered others within this time meanwhile: else the
server is slow, or this process has no processor.
"""
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
    commands, because the call itself is at fault then; and once ``stop_if`` returns True. Each try after the first such
    failure is watched: it counts only if the server answered all the time. Logs the first error of each outage with
    ``what``, then one every `LOG_EVERY_S`.
    """
    loop = asyncio.get_running_loop()
    pause, at_fault, say_at = FIRST_PAUSE_S, 0, 0.0
    while True:
        beat()
        watch = _Watch(server) if at_fault else None
        try:
            return await attempt()
        except (RedisError, OSError) as e:
            if is_final(e) or (stop_if and stop_if()):
                raise
            if not may_pass(e):
                without_reply = isinstance(e, NoReply)
                if await (watch.saw_answers(prompt=without_reply) if watch else server.answers()):
                    at_fault += TRIES_WITHOUT_REPLY if without_reply else 1
                else:
                    at_fault = 0
            if at_fault >= tries:
                log.error("%s: given up, for the server answers others: %s", what, str(e) or type(e).__name__)
                raise
            if loop.time() >= say_at:
                say_at = loop.time() + LOG_EVERY_S
                log.warning("%s: trying again until the server takes it: %s", what, str(e) or type(e).__name__)
        finally:
            if watch:
                await watch.end()
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_S)


class _Watch:
    """Small commands beside a try: whether the server answered them, and how fast this process saw it."""

    def __init__(self, server: Server) -> None:
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._look(server), name="watch of a command")

    async def saw_answers(self, *, prompt: bool) -> bool:
        """Whether all were answered, until now and once more; ``prompt``: within `PROMPT_S` each."""
        self._over.set()
        return await self._task <= (PROMPT_S if prompt else math.inf)

    async def end(self) -> None:
        await stop_task(self._task)

    async def _look(self, server: Server) -> float:
        """The longest wait for an answer; NaN if one failed."""
        clock = asyncio.get_running_loop().time
        longest, last = 0.0, False
        while not last:
            last = self._over.is_set()
            due = clock() + LOOK_S
            await wait_briefly(self._over, timeout_s=LOOK_S)
            began = min(clock(), due)  # a timer that is late is a wait, too
            if not await server.answers():
                return math.nan
            longest = max(longest, clock() - began)
        return longest

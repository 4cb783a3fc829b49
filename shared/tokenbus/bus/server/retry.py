"""How workers live through a server that is away, restarting, failing over or full: they try again until it answers.

But never without end at the head of a line. What breaks because of this very command (it is too large, say, and breaks
the connection each time, or something between here and the server answers with an error that nobody knows) breaks while
the server answers others. So it is tried a bounded number of times, and then its caller sets it apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import beat
from tokenbus.bus.server.server import Server, is_final, may_pass

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
"""Short enough that a worker is back within a second of its server."""
MAX_TRIES = 12
"""Tries of a command that breaks while the server answers others: some 4 s. The more, the longer it holds up its line;
the fewer, the sooner a network that breaks many connections is taken for a fault of the command."""
ISOLATED_TRIES = 6
"""The same for a part of what was tried so often already."""
A_SILENCE = 3
"""A command without a reply counts as so many tries: each takes seconds."""
SAY_AGAIN_S = 30.0


async def retry_until_available(
    server: Server,
    attempt: Callable[[], Awaitable[T]],
    *,
    what: str,
    stop_if: Callable[[], bool] | None = None,
    tries: int = MAX_TRIES,
) -> T:
    """Retry ``attempt`` until the server accepts it. Use only for idempotent calls.

    Raises what redis-py raises: at once where another try cannot help; after ``tries`` failures while the server
    answered others, for then the call itself is at fault; and once ``stop_if`` says that nobody waits any more. The
    first error of each outage is logged with ``what``, and one each `SAY_AGAIN_S`.
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
                    at_fault += A_SILENCE if isinstance(e, NoReply) else 1
                else:
                    at_fault = 0
            if at_fault >= tries:
                log.error("%s: given up, for the server answers others: %s", what, str(e) or type(e).__name__)
                raise
            if loop.time() >= say_at:
                say_at = loop.time() + SAY_AGAIN_S
                log.warning("%s: trying again until the server takes it: %s", what, str(e) or type(e).__name__)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

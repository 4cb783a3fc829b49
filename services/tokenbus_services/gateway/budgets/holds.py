"""The names under which a budget reserves what runs may cost, and under which their use is counted.

An id may be used again, by a client that deleted its run or its session, or that waited until it expired. So a name is
made for each admission, ``<id>#<mark>``, and travels in the run's note: a name that was counted to its end is never the
name of another run.
"""

from __future__ import annotations

import secrets

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.child_runs import parent_call
from tokenbus.events.sessions import session_run
from tokenbus_services.gateway.surfaces.contract import Payer


def new_hold(of: str) -> str:
    """A new name for a run or an append."""
    return f"{of}#{secrets.token_hex(8)}"


def named_in(hold: str) -> str:
    """The run or the append that the name was made for."""
    return hold.rpartition("#")[0]


def hold_of(run: str, payer: Payer) -> str:
    """The name for a run with the note of this payer. A child run has the mark of its root: both begin once."""
    if payer.hold is None:
        return run
    if parent_call(run):
        return f"{run}#{payer.hold.rpartition('#')[2]}"
    # The note of a run that somebody publishes under another id names what is counted already.
    return payer.hold if session_run(run) or named_in(payer.hold) == run else run


async def note_newest(server: Server, keys: Keys, of: str, hold: str, key: str, *, kept_ms: int) -> None:
    """Remember the newest name for a run or an append that has not begun, and whose it is. Raises redis-py's errors."""
    pipe = server.client.pipeline(transaction=False)
    pipe.hset(keys.gateway_counted(of), mapping={"client": key, "newest": hold})
    pipe.pexpire(keys.gateway_counted(of), kept_ms)
    await pipe.execute()


async def newest_hold(server: Server, keys: Keys, of: str) -> tuple[str, str] | None:
    """The newest name for a run, an append or a call, and the key that it is of. Raises redis-py's errors."""
    found: list[bytes | None] = await server.client.hmget(keys.gateway_counted(of), ["client", "newest"])
    client, newest = found
    return None if client is None else (of if newest is None else newest.decode(), client.decode())

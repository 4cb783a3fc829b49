"""Entries of a work queue that break the connection of whoever takes them: set apart by their id, without a look.

Such an entry is given out all the same, and counted: so it comes back to one worker after the other. What else was in
the reply that it broke was given out too, and its deliveries say wrongly that its workers died.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus.outage import ISOLATED_TRIES, retry_until_available
from tokenbus.bus.scripts.call import Call, script
from tokenbus.bus.send import send
from tokenbus.bus.server import Server, is_final, may_pass

BROKEN_DELIVERIES = 3
"""An entry that was given out so often, the last time to a worker that never saw it, is looked at by itself."""
MOST_LOOKED_AT = 32
_NAME_BYTES = 1024

_NAMES = script(
    "names",
    f"""
local entry, names = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1], {{}}
for i = 1, entry and #entry[2] or 0, 2 do names[#names + 1] = string.sub(entry[2][i], 1, {_NAME_BYTES}) end
return names
""",
)


async def may_be_an_entry(server: Server, error: Exception) -> bool:
    """Whether what broke the reading may be an entry: the server answers others."""
    return (
        isinstance(error, RedisError | OSError)
        and not may_pass(error)
        and not is_final(error)
        and await server.answers()
    )


async def never_arrived(
    server: Server, stream: str, *, group: str, consumer: str, held: Collection[tuple[str, str]]
) -> list[tuple[str, int]]:
    """The ids of entries that this worker was given, and others before it, and does not have; how often each was."""
    client: Any = server.client
    pending = await client.xpending_range(
        stream, group, min="-", max="+", count=len(held) + MOST_LOOKED_AT, consumername=consumer
    )
    found = [(each["message_id"].decode(), int(each["times_delivered"])) for each in pending]
    return [(i, n) for i, n in found if n >= BROKEN_DELIVERIES and (stream, i) not in held][:MOST_LOOKED_AT]


async def why_unreadable(server: Server, stream: str, entry_id: str) -> Exception | None:
    """What breaks when this entry alone is read; None: nothing does."""
    try:
        await retry_until_available(
            server,
            lambda: server.client.xrange(stream, entry_id, entry_id),
            what=f"entry {entry_id} of {stream}",
            tries=ISOLATED_TRIES,
        )
    except (RedisError, OSError) as e:
        return e
    return None


async def names_in(server: Server, stream: str, entry_id: str) -> list[bytes]:
    """The names of an entry's fields, of which the server tells without the rest."""
    call = Call(_NAMES, [stream], [entry_id])
    return await retry_until_available(server, lambda: send(server, call), what="names in an entry")

"""What lies on the server, whole: to see that a call wrote nothing."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server


async def everything(server: Server, keys: Keys) -> dict[bytes, bytes]:
    """The value of each key of the test, as the server would save it."""
    client = server.client
    names = [name async for name in client.scan_iter(match=f"{keys.prefix}*", count=1000)]
    return {name: await client.dump(name) for name in names}

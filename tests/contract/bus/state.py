"""The server's whole content, to check that a call wrote nothing."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server


async def everything(server: Server, keys: Keys, *, at_once: bool = True) -> dict[bytes, bytes]:
    """The value of each key of the test, as the server would save it. ``at_once``: all at one moment, which a full
    server refuses.
    """
    client = server.client
    names = [name async for name in client.scan_iter(match=f"{keys.prefix}*", count=1000)]
    pipe = client.pipeline(transaction=at_once)
    for name in names:
        pipe.dump(name)
    return {name: value for name, value in zip(names, await pipe.execute(), strict=True) if value is not None}


async def put_back(server: Server, keys: Keys, past: dict[bytes, bytes]) -> None:
    """Make the server's state this past one again, in one step: what a fail-over to a replica that lags behind does."""
    client = server.client
    pipe = client.pipeline(transaction=True)
    for name in (await everything(server, keys)).keys() - past.keys():
        pipe.delete(name)
    for name, value in past.items():
        ttl_ms = max(0, await client.pttl(name))
        pipe.restore(name, ttl_ms, value, replace=True)
    await pipe.execute()

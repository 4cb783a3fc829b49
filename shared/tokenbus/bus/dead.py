"""Where poison goes: the dead stream keeps each entry's bytes with the reason and where it came from."""

from __future__ import annotations

import builtins

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.outage import outlast
from tokenbus.bus.server import Server


class DeadEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One JSON object of the dead stream; ``bytes`` is base64."""

    reason: str
    stage: str
    """Who could not take it: a stage, or ``intake``, ``fetcher``, ``tools``."""
    stream: str
    entry: str
    """The entry's id in ``stream``."""
    bytes: builtins.bytes
    run: str | None = None


async def bury(server: Server, keys: Keys, entry: DeadEntry, *, most: int) -> None:
    """Keep the entry, among the last ``most``. Tries until the server has it, so it may show twice."""
    data = msgspec.json.encode(entry)
    await outlast(
        lambda: server.client.xadd(keys.dead, {DATA_FIELD: data}, maxlen=most, approximate=True),
        what=f"dead entry of {entry.stage}",
    )

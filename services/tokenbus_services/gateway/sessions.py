"""What clients call their conversations and runs, and which run of the bus that is: keys with a TTL in Redis.

Any gateway finds them, so a client may resume at another one than it began at.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.run_record import ENDED, read_status
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import id_key

SESSION_TTL_S = 3600
"""As long as run logs are kept by default: after that there is nothing to join."""
MAX_BODY_BYTES = 2**20
"""Larger requests are not kept: many of them would fill the server."""


class Session(msgspec.Struct, frozen=True, omit_defaults=True):
    """The run that a client knows by a name of its own."""

    run: str
    body: bytes = b""
    """The request, if the surface needs it to answer a client that joins."""


class Sessions:
    """The sessions of one surface, by tenant and the client's name."""

    def __init__(self, surface: str, *, server: Server, keys: Keys) -> None:
        self._surface = surface
        self._server = server
        self._keys = keys

    async def put(self, tenant: str, name: str, session: Session) -> Session | None:
        """Store a session, without a large body; return the one that it replaces."""
        if len(session.body) > MAX_BODY_BYTES:
            session = Session(session.run)
        value = msgspec.msgpack.encode(session)
        with translated(self._server):
            old: bytes | None = await self._server.client.set(
                self._key(tenant, name), value, ex=SESSION_TTL_S, get=True
            )
        return msgspec.msgpack.decode(old, type=Session) if old else None

    async def get(self, tenant: str, name: str) -> Session | None:
        with translated(self._server):
            value: bytes | None = await self._server.client.get(self._key(tenant, name))
        return msgspec.msgpack.decode(value, type=Session) if value else None

    async def has_ended(self, run: str) -> bool:
        """Whether a run is over. One that was not accepted yet is not."""
        with translated(self._server):
            await locate(self._server, self._keys, run)
            return await read_status(self._server.client, self._keys.run(run)) in ENDED

    async def last_seq(self, run: str) -> int:
        """Seq of the last event on the run's log; -1 if it is empty."""
        with translated(self._server):
            await locate(self._server, self._keys, run)
            last: list[Any] = await self._server.client.xrevrange(self._keys.log(run), count=1)
        return id_key(last[0][0].decode())[1] if last else -1

    def _key(self, tenant: str, name: str) -> str:
        # A hash, because both names are the clients' own: neither may run into the other.
        parts = "".join(f"{len(part)}:{part}" for part in (tenant, name))
        return f"{self._keys.prefix}:{{gateway}}:{self._surface}:{sha256(parts.encode()).hexdigest()[:32]}"

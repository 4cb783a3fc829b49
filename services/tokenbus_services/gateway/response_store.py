"""What the Responses API asks about a stored run: its log so far, its request, whether it was deleted."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.bus.erase import erase_runs, with_children
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.run_record import REQUEST, UNENDED, read_status
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.decode import public_event
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Message
from tokenbus_services.gateway.surfaces.contract import GatewayNote

_PAGE = 1_000
_DELETED_S = 7 * 86_400
"""Longer than the records of a run are kept by default."""
_PUBLISHED_S = 3_600


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A background request that intake has not taken in yet."""

    note: GatewayNote
    tenant: str = ""


class _Stored(msgspec.Struct):
    messages: list[Message] = []


class ResponseStore:
    """Reads of the bus for one gateway. All methods raise ServerUnavailable."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def events_so_far(self, run: str) -> list[PublicEvent]:
        """The run's log as it is now."""
        with translated(self._server):
            await locate(self._server, self._keys, run)
        key = self._keys.log(run)
        events: list[PublicEvent] = []
        first = "-"
        with translated(self._server):
            while page := await self._page(key, first):
                events += [public_event(run, entry) for entry in page]
                first = f"({page[-1][0].decode()}"
        return events

    async def is_open(self, run: str) -> bool:
        """Whether the run may still say something."""
        with translated(self._server):
            await locate(self._server, self._keys, run)
            return await read_status(self._server.client, self._keys.run(run)) in UNENDED

    async def messages(self, run: str) -> list[Message] | None:
        """The messages of the run's request; None if its records have expired."""
        with translated(self._server):
            await locate(self._server, self._keys, run)
            stored: bytes | None = await self._server.client.hget(self._keys.run(run), REQUEST)
        return msgspec.json.decode(stored, type=_Stored).messages if stored else None

    async def delete(self, run: str) -> set[str] | None:
        """Delete all that the server keeps of the run and its child runs, and forget the response. Returns those runs;
        None: the run is open, and stays.
        """
        with translated(self._server):
            runs = await with_children(self._server, self._keys, [run])
            if (await erase_runs(self._server, self._keys, runs)).open:
                return None
            await self._server.client.set(self._keys.gateway_deleted(run), b"1", ex=_DELETED_S)
            return runs

    async def is_deleted(self, run: str) -> bool:
        """Whether the response was forgotten."""
        with translated(self._server):
            return bool(await self._server.client.exists(self._keys.gateway_deleted(run)))

    async def remember(self, run: str, published: Published) -> None:
        """Keep the known facts of a run that cannot be looked up yet."""
        with translated(self._server):
            await self._server.client.set(
                self._keys.gateway_published(run), msgspec.json.encode(published), ex=_PUBLISHED_S
            )

    async def published(self, run: str) -> Published | None:
        """What `remember` kept."""
        with translated(self._server):
            found: bytes | None = await self._server.client.get(self._keys.gateway_published(run))
        return msgspec.json.decode(found, type=Published) if found else None

    async def _page(self, key: str, first: str) -> list[Any]:
        return await self._server.client.xrange(key, first, "+", count=_PAGE)

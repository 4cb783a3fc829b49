"""Lists the sessions of a deployment by the time of their last event, in pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_index import IndexReader, Position, fill, merged
from tokenbus.bus.server.server import translated
from tokenbus.client.deployment import Deployment
from tokenbus.client.run_list import seconds_of
from tokenbus.errors import SessionNotFound
from tokenbus.events.sessions import SessionInfo, session_ref

PAGE = 64
"""Sessions read from each sorted set at once, and summaries in one pipeline."""
_FIELDS = ("name", "tenant", "begun", "provider", "model", "metadata", "begins", "runs", "run", "deleting")
_metadata = msgspec.json.Decoder(dict[str, object])


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions to list; see `Client.sessions`."""

    tenant: str | None = None
    metadata: Mapping[str, object] = {}
    words: str | None = None
    older_than_s: float | None = None

    def wants(self, info: SessionInfo) -> bool:
        """Whether the session passes, apart from tenant and age."""
        if any(info.metadata.get(name) != value for name, value in self.metadata.items()):
            return False
        text = " ".join((info.session, info.begins, *map(str, info.metadata.values()))).casefold()
        return all(word in text for word in (self.words or "").casefold().split())


def session_filter(
    *,
    tenant: str | None = None,
    metadata: Mapping[str, object] | None = None,
    words: str | None = None,
    older_than: float | timedelta | None = None,
) -> SessionFilter:
    """Check the arguments of `Client.sessions`. Raises ValueError."""
    if tenant == "":
        raise ValueError("tenant: it is empty; None is every tenant")
    return SessionFilter(tenant=tenant, metadata=metadata or {}, words=words, older_than_s=seconds_of(older_than))


async def list_sessions(
    deployment: Deployment,
    wanted: SessionFilter,
    *,
    after: Position | None = None,
    newest_first: bool = True,
    limit: int | None = None,
) -> AsyncGenerator[tuple[Position, SessionInfo | None]]:
    """Yield the sessions that pass, each with its place, from behind the place ``after``; and after each page the place
    up to which it was read, for a caller who reads so many pages and no more. Raises ServerUnavailable.
    """
    keys = await deployment.keys()
    await deployment.refresh()  # more partitions may have been added
    client, left = deployment.server.client, limit
    until_ms = None
    if wanted.older_than_s is not None:
        with translated(deployment.server):
            await deployment.server.clock.measure()
        until_ms = deployment.server.clock.now_ms() - round(wanted.older_than_s * 1000)
    sources = [
        IndexReader(
            keys.sessions(partition, wanted.tenant or ""), newest_first=newest_first, after=after, until_ms=until_ms
        )
        for partition in range(keys.partitions)
    ]
    while left != 0:
        async with deployment.hub.reads:
            with translated(deployment.server):
                await fill(client, sources, PAGE)
                places = merged(sources, PAGE, newest_first=newest_first)
                found = await _read(client, keys, places)
        if not places:
            return
        for (_, place), info in zip(places, found, strict=True):
            if info is not None and wanted.wants(info):
                yield place, info
                left = None if left is None else left - 1
                if left == 0:
                    return
        yield places[-1][1], None


async def session_info(deployment: Deployment, name: str, tenant: str) -> SessionInfo:
    """One session's line in the list. Raises SessionNotFound, ServerUnavailable."""
    ref = session_ref(tenant, name)
    keys = await deployment.keys_of(ref)
    partition, client = keys.partition_of(ref), deployment.server.client
    with translated(deployment.server):
        at_ms: float | None = await client.zscore(keys.sessions(partition), ref)
        (info,) = await _read(client, keys, [(partition, Position(int(at_ms or 0), ref))])
    if info is None:
        raise SessionNotFound(name)
    return info


async def _read(client: Any, keys: Keys, places: list[tuple[int, Position]]) -> list[SessionInfo | None]:
    """The summaries; None for a session that was deleted or has expired."""
    pipe = client.pipeline(transaction=False)
    for partition, place in places:
        at = keys.within(partition)
        pipe.hmget(at.session(place.run), _FIELDS)
        pipe.zcard(at.of_session(place.run)[2])
    replies: list[Any] = await pipe.execute() if places else []
    return [_info(place, *replies[2 * n : 2 * n + 2]) for n, (_, place) in enumerate(places)]


def _info(place: Position, fields: list[bytes | None], waiting: int) -> SessionInfo | None:
    name, tenant, begun, provider, model, metadata, begins, runs, run, deleting = fields
    if name is None or deleting is not None:
        return None
    return SessionInfo(
        session=name.decode(),
        tenant=(tenant or b"").decode() or None,
        begun_ms=int(begun or 0),
        last_ms=place.at_ms,
        provider=(provider or b"").decode(),
        model=(model or b"").decode(),
        metadata=_metadata.decode(metadata or b"{}"),
        begins=(begins or b"").decode(errors="replace"),
        runs=int(runs or 0),
        run=(run or b"").decode() or None,
        waiting=waiting,
    )

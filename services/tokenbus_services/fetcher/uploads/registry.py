"""Which blobs lie with which provider as files: known to all fetchers of a deployment, for as long as that is of use.

A row is a key of its own, named by the digest of all that a file depends on; its time runs out before the file's own.
A blob that was sent, and not as a file, leaves an empty row. There is nothing here that could not be found out anew: a
server that is away, or that forgot, costs an upload at the most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

SENT = ""
"""The blob was sent, and not as a file."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class UploadedFiles:
    """The table. Its rows are named by digests (`Keys.file`)."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def look(self, names: Iterable[str]) -> dict[str, str] | None:
        """The file ids of those that have a row (`SENT` for an empty one); None where the server cannot be asked."""
        asked = list(dict.fromkeys(names))
        try:
            # One command each: in a Cluster they lie anywhere.
            values = await asyncio.gather(*(self._server.client.get(self._keys.file(name)) for name in asked))
        except (RedisError, OSError) as e:
            log.warning("uploads_not_known", error=str(e))
            return None
        return {name: value.decode() for name, value in zip(asked, values, strict=True) if value is not None}

    async def sent(self, names: Iterable[str], keep_s: float) -> None:
        """These were sent, and not as files. A row that is there already stays."""
        await self._set(names, SENT, keep_s, only_new=True)

    async def put(self, name: str, file_id: str, keep_s: float) -> None:
        """It lies with the provider now. Of two fetchers that uploaded at once, the later one's file is used on."""
        await self._set([name], file_id, keep_s)

    async def drop(self, names: Iterable[str], keep_s: float) -> None:
        """Their files are gone. Where another fetcher put a new one in this very moment, it is uploaded once more."""
        await self._set(names, SENT, keep_s)

    async def _set(self, names: Iterable[str], value: str, keep_s: float, *, only_new: bool = False) -> None:
        ms = max(1, round(keep_s * 1000))
        try:
            await asyncio.gather(
                *(self._server.client.set(self._keys.file(name), value, px=ms, nx=only_new) for name in set(names))
            )
        except (RedisError, OSError) as e:
            log.warning("uploads_not_kept", error=str(e))

"""Which blobs exist as files at which provider, shared by all fetchers of a deployment.

Each row is its own key, named by a digest of everything the file depends on; it expires before the file does. A blob
that was sent without becoming a file leaves an empty row. All of this can be rebuilt: if the server is unavailable or
lost rows, the worst cost is another upload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

SENT = ""
"""Row value: the blob was sent, but not as a file."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class UploadedFiles:
    """The registry. Its rows are named by digests (`Keys.file`)."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def look(self, names: Iterable[str]) -> dict[str, str] | None:
        """Return the file ids of the names that have a row (`SENT` for an empty one); None if the server is
        unavailable.
        """
        distinct = list(dict.fromkeys(names))
        try:
            # One command each: in a Cluster the keys may be on any node.
            values = await asyncio.gather(*(self._server.client.get(self._keys.file(name)) for name in distinct))
        except (RedisError, OSError) as e:
            log.warning("upload_registry_not_read", error=str(e))
            return None
        return {name: value.decode() for name, value in zip(distinct, values, strict=True) if value is not None}

    async def sent(self, names: Iterable[str], keep_s: float) -> None:
        """Record that these were sent, but not as files. Existing rows stay."""
        await self._set(names, SENT, keep_s, only_new=True)

    async def put(self, name: str, file_id: str, keep_s: float) -> None:
        """Record a file. If two fetchers uploaded at once, the later one's file is used."""
        await self._set([name], file_id, keep_s)

    async def drop(self, names: Iterable[str], keep_s: float) -> None:
        """Forget files that are gone. If another fetcher records a new one at this moment, it is uploaded once more."""
        await self._set(names, SENT, keep_s)

    async def _set(self, names: Iterable[str], value: str, keep_s: float, *, only_new: bool = False) -> None:
        ms = max(1, round(keep_s * 1000))
        try:
            await asyncio.gather(
                *(self._server.client.set(self._keys.file(name), value, px=ms, nx=only_new) for name in set(names))
            )
        except (RedisError, OSError) as e:
            log.warning("upload_registry_not_written", error=str(e))

"""Which blobs exist as files at which provider, shared by all fetchers of a deployment.

Each row is its own key, named by a digest of everything the file depends on; it expires before the file does. A blob
that was sent without becoming a file leaves an empty row. All of this can be rebuilt: if the server is unavailable or
lost rows, the worst cost is another upload.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import IDLE_S, beat
from tokenbus.bus.server.server import Server
from tokenbus.providers.file_api import ProviderFile
from tokenbus_services.media.blob_cache import Found

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


# An upload in progress, and how its waiting turns know that it progresses.
#
# Turns that need the same file share one upload, which runs in its own task. While the upload progresses, so do they.
# If it makes no progress for longer than its step may take, their work counts as stuck, so a stalled upload delays none
# of them forever.

PIECE_S = 60.0
"""How long the next piece of a blob may take: from its store, or to the provider."""


class Flight:
    """An upload that turns wait for; cancelled when the last of them is."""

    def __init__(self) -> None:
        self.waiting = 0
        self.task: asyncio.Task[ProviderFile] | None = None
        self._quiet_until = 0.0
        """Until then it may be silent, in the event loop's time."""

    def start(self, work: Coroutine[Any, Any, ProviderFile]) -> None:
        """Start the upload."""
        self.moves(PIECE_S)
        self.task = asyncio.create_task(work, name="upload")

    def moves(self, quiet_s: float) -> None:
        """Record progress. The next step may take this long."""
        self._quiet_until = max(self._quiet_until, asyncio.get_running_loop().time() + quiet_s)

    async def landed(self) -> ProviderFile:
        """Wait for its end, with a beat as long as it progresses. Raises what the upload raised."""
        assert self.task
        loop = asyncio.get_running_loop()
        while not (await asyncio.wait({self.task}, timeout=IDLE_S))[0]:
            if loop.time() < self._quiet_until:
                beat()
        return self.task.result()

    def watched(self, found: Found) -> Found:
        """The same blob; each piece that is read of it is progress."""
        return msgspec.structs.replace(found, pieces=_counted(found.pieces, lambda: self.moves(PIECE_S)))


def _counted(
    pieces: Callable[[], AsyncGenerator[bytes]], moved: Callable[[], None]
) -> Callable[[], AsyncGenerator[bytes]]:
    async def counted() -> AsyncGenerator[bytes]:
        async with aclosing(pieces()) as read:
            async for piece in read:
                moved()
                yield piece

    return counted

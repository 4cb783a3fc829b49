"""What is wrong outside the bus now: providers and the blob store, looked at again and again."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from redis.exceptions import NoPermissionError

from tokenbus.bus.activity import SLOT_MS
from tokenbus.bus.activity_slots import ActivitySlots
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus_services.cli.inspect.blob_facts import BlobFailure, blob_failure
from tokenbus_services.cli.inspect.provider_facts import FailingModel, SilentModel, failing_models, silent_models

LATELY_S = 120


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What fails now."""

    failing: list[FailingModel] = []
    """Models with calls that failed lately and none that ended well afterwards."""
    silent: list[SilentModel] = []
    blobs: BlobFailure | None = None


class TroubleObserver:
    """Looks at what the deployment counted, and at the blob store."""

    def __init__(self, server: Server, keys: Keys, *, blobs_url: str | None) -> None:
        """``blobs_url``: None if the blob service is not this project's."""
        self._server = server
        self._blobs_url = blobs_url
        self._activity = ActivitySlots(server, keys, kept=LATELY_S * 1000 // SLOT_MS)

    async def look(self) -> Trouble:
        """Look once. What this user may not see, or does not answer, is left out. Raises ServerUnavailable."""
        with translated(self._server), suppress(NoPermissionError):
            await self._server.clock.measure()
            await self._activity.read()
        slots, now_ms = self._activity.slots, self._server.clock.now_ms()
        return Trouble(
            failing=[each for each in failing_models(slots, now_ms) if not each.is_over],
            silent=silent_models(slots, now_ms),
            blobs=await self._blob_failure(),
        )

    async def _blob_failure(self) -> BlobFailure | None:
        if self._blobs_url is None:
            return None
        with suppress(OSError, ValueError):
            return await blob_failure(self._blobs_url, within_s=LATELY_S)
        return None

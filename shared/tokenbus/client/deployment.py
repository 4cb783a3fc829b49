"""The deployment a client talks to: its server, and the keys that the deployment agreed on."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from tokenbus.bus.keys import DEFAULT_PARTITIONS, Keys
from tokenbus.bus.layout import Layout, has_archive, locate, read_layout
from tokenbus.bus.server.durability import Durability
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.url import url_in_env
from tokenbus.client.archive import Archive
from tokenbus.client.local_up import data_directory, running_in
from tokenbus.client.tailing import Hub
from tokenbus.errors import DeploymentMismatch, ServerUnavailable, SettingsError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
ARCHIVE_S = 5.0
"""How often a client that found no archive looks again, when a run is not on the server."""
REFRESH_S = 1.0
"""How often a client asks, while it reads, whether the number of partitions was changed."""


class Deployment:
    """A server and its key names. If the deployment does not exist yet, each call asks again."""

    def __init__(self, server: Server, prefix: str, partitions: int | None) -> None:
        """``partitions``: the user's choice; None for the deployment's own. Raises SettingsError."""
        self.server = server
        self.durability: Durability | None = server.durability
        """None: it waits for no replica, and refuses requests that ask for that."""
        self.hub = Hub(server)
        self.closed = False
        self._wanted = partitions
        self._agreed = False
        self._said = False
        """Whether the log says already that no deployment is there."""
        self._asked_at = 0.0
        self.make_archive: Callable[[], Archive] | None = None
        """Makes the client of the archive, in case the deployment has one; may raise SettingsError."""
        self._archive: Archive | None = None
        self._archive_asked_at: float | None = None
        try:
            self._keys = Keys(prefix, DEFAULT_PARTITIONS if partitions is None else partitions)
        except ValueError as e:
            raise SettingsError("client", "prefix or partitions", str(e)) from None

    @property
    def unheard(self) -> str | None:
        """The prefix, while no deployment has begun with it."""
        return None if self._agreed else self._keys.prefix

    async def aclose(self) -> None:
        """Close all connections. Any use after this raises RuntimeError."""
        self.closed = True
        try:
            await self.hub.aclose()
        finally:
            await self.server.aclose()

    async def keys(self) -> Keys:
        """Return the key names. Raises DeploymentMismatch, ServerUnavailable; RuntimeError if the client is closed."""
        if self.closed:
            raise RuntimeError("the client is closed")
        if not self._agreed:
            async with self.hub.reads:
                await self._ask()
        return self._keys

    async def keys_of_now(self) -> Keys:
        """Return the key names with the partitions that there are at this moment, for a reader that begins at the end
        of each. Of one that is added later it reads all. Raises as `keys` does.
        """
        asked_at = self._asked_at
        keys = await self.keys()
        if self._asked_at == asked_at:
            await self.refresh(older_than_s=0)
        return keys

    async def archive(self) -> Archive | None:
        """Return the client of the deployment's archive; None if it has none.

        Raises SettingsError, ServerUnavailable.
        """
        now, asked_at = time.monotonic(), self._archive_asked_at
        if self._archive is None and self.make_archive and (asked_at is None or now - asked_at >= ARCHIVE_S):
            keys = await self.keys()
            with translated(self.server):
                there = await has_archive(self.server, keys)
            self._archive_asked_at = now
            self._archive = self.make_archive() if there else None
        return self._archive

    async def _ask(self) -> None:
        if self._agreed:
            return  # another task read it while this one waited
        if layout := await self._read():
            self._agree(layout)
        elif not self._said:
            self._said = True
            nobody = (
                "no deployment has begun with the prefix %r on %s: until one does, nobody takes requests or answers"
            )
            log.warning(nobody, self._keys.prefix, self.server.url.safe)

    async def _read(self) -> Layout | None:
        self._asked_at = time.monotonic()
        with translated(self.server):
            layout = await read_layout(self.server, self._keys)
        if layout:
            self.durability = layout.durability
            self.server.durability = layout.durability or Durability()
        return layout

    async def still(self, keys: Keys) -> None:
        """Check that ``keys`` are still right, and let them follow a change. Raises DeploymentMismatch if they were
        guessed wrongly before the deployment existed; ServerUnavailable.
        """
        now = await self.keys()
        if now is not keys:
            raise DeploymentMismatch("partitions", str(keys.partitions), str(now.partitions))
        await self.refresh()

    async def refresh(self, *, older_than_s: float = REFRESH_S) -> None:
        """Check for a change of the deployment's partitions, if the last check is older than this.

        Raises DeploymentMismatch, ServerUnavailable.
        """
        if self._agreed and time.monotonic() - self._asked_at >= older_than_s and (layout := await self._read()):
            self._keys.apply(layout.numbers, layout.spread, layout.epoch, layout.ever)

    async def keys_of(self, run: str) -> Keys:
        """Return the key names for this run, after finding out in which partition it is now. Raises as `keys` does."""
        keys = await self.keys()
        with translated(self.server):
            found = await locate(self.server, keys, run)
        if not found:
            await self.refresh()
        return keys.within(keys.partition_of(run))

    def _agree(self, layout: Layout) -> None:
        wanted = self._wanted
        if wanted is not None and wanted not in layout.ever:
            raise DeploymentMismatch("partitions", str(wanted), str(layout.placing))
        if self._keys.numbers != layout.numbers or self._keys.partitions != layout.spread or layout.epoch:
            self._keys = Keys(self._keys.prefix, layout.placing)
            self._keys.apply(layout.numbers, layout.spread, layout.epoch, layout.ever)
        self._agreed = True


class Outage:
    """Retry policy of a reader during an outage: growing pauses, until the server has been unavailable for
    ``bound_s``."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._since: float | None = None
        self._pause_s = FIRST_PAUSE_S

    async def wait(self, error: ServerUnavailable) -> None:
        """Pause before the next try. Raises ``error`` if the server has been unavailable for too long."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._bound_s:
            raise error
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def over(self) -> None:
        """Reset after the server answered."""
        self._since = None
        self._pause_s = FIRST_PAUSE_S


def partitions_in(env: Mapping[str, str]) -> int | None:
    """Return the value of `TOKENBUS_PARTITIONS`; None if it is not set. Raises SettingsError."""
    text: Any = env.get("TOKENBUS_PARTITIONS")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise SettingsError("environment", "TOKENBUS_PARTITIONS", f"{text!r} is not a number")
    return int(text)


def url_in(env: Mapping[str, str]) -> str:
    """Return `TOKENBUS_REDIS_URL`, or else the server of the `tokenbus up` running in this directory.

    Raises SettingsError if there is neither.
    """
    if url := url_in_env(env):
        return url
    directory = data_directory(env)
    if (running := running_in(directory)) and running.redis_url:
        return running.redis_url
    problem = (
        f"not set, Client was given no url, and no `tokenbus up` runs with its data in {directory.resolve()}: "
        "start one, run in the directory of the one that runs, or give the address of a server"
    )
    raise SettingsError("environment", "TOKENBUS_REDIS_URL", problem)

"""A replay that notes each step before it begins, so that the next owner knows at which step the worker died.

A checkpoint or an entry that crashes its workers leaves no error behind. So after some unfinished replays the next ones
are careful. At first they note each page of entries. Within a page at which a worker died, they note each frame, and
they leave out a frame at which two workers died. Only the run of that frame loses its state. The same holds for
checkpoints, all of which are one page.
"""

from __future__ import annotations

from typing import Self

import msgspec

from tokenbus.bus import scripts
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

CAREFUL_REPLAYS = 2
"""After more unfinished replays in a row than this, the next ones are careful."""
MOST_DEATHS = 2
"""A step is left out after this many workers died at it. One more died at its page."""
CAREFUL_PAGE = 50
"""Entries per page. Each note costs a command; with pages a careful replay takes hardly longer than any other."""
STEPS_FIELD = "replaying"
"""The lease hash's field of `NotedSteps`."""
REASON = f"{MOST_DEATHS} workers died as they restored it"


class NotedSteps(msgspec.Struct, frozen=True, array_like=True):
    """The notes of a careful replay."""

    page: str = ""
    """The last page that began."""
    step: str = ""
    """The last step of it that began, if its steps were noted."""
    tries: int = 0
    """How often that step began in unfinished replays."""
    left_out: dict[str, str] = {}
    """Steps to leave out, and their pages."""

    @classmethod
    def parse(cls, stored: bytes | None) -> Self:
        """From the lease hash; empty if there is nothing, or it is from an unknown version."""
        try:
            return msgspec.msgpack.decode(stored or b"", type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return cls()


class CarefulReplay:
    """Notes the steps of one owner's replay, which may start over while the server is unavailable."""

    def __init__(self, server: Server, lease_key: str, found: NotedSteps) -> None:
        """``found``: the notes of the last replay, which did not finish."""
        self._server = server
        self._lease_key = lease_key
        self._found = found
        self._left_out = dict(found.left_out)
        if found.tries >= MOST_DEATHS:
            self._left_out[found.step] = found.page
        self._page = ""

    async def begin_page(self, page: str) -> bool:
        """Note that the page begins. True: each of its steps must `begin` too. Raises redis-py's errors."""
        self._page = page
        if page == self._found.page or page in self._left_out.values():
            return True
        await self._note(NotedSteps(page, left_out=self._left_out))
        return False

    async def begin(self, step: str) -> bool:
        """Note that the step begins. False: it must be left out. Raises redis-py's errors."""
        if step in self._left_out:
            return False
        tries = self._found.tries + 1 if step == self._found.step else 1
        await self._note(NotedSteps(self._page, step, tries, self._left_out))
        return True

    async def _note(self, noted: NotedSteps) -> None:
        value = msgspec.msgpack.encode(noted)
        await run_script(self._server, scripts.note(self._lease_key, field=STEPS_FIELD, value=value))

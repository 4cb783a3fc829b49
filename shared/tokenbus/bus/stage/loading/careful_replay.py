"""A replay that notes each of its steps before it begins: the next owner knows then on which step its worker died.

A checkpoint or an entry that crashes its workers leaves no error behind. So after some replays that came to no end, the
next ones are careful, and leave out a step on which workers died twice. Only the runs of that step lose their state.
"""

from __future__ import annotations

from typing import Self

import msgspec

from tokenbus.bus import scripts
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

CAREFUL_REPLAYS = 2
"""After more replays than this in a row that came to no end, the next ones are careful."""
MOST_DEATHS = 2
"""A step is left out after its workers died so often."""
STEPS_FIELD = "replaying"
"""The lease hash's field of `NotedSteps`."""
REASON = f"{MOST_DEATHS} workers died as they restored it"


class NotedSteps(msgspec.Struct, frozen=True, array_like=True):
    """What a careful replay has written down."""

    step: str = ""
    """The last step that began."""
    tries: int = 0
    """How often it began in replays that came to no end."""
    left_out: list[str] = []

    @classmethod
    def parse(cls, stored: bytes | None) -> Self:
        """From the lease hash; empty if it is from an unknown version."""
        try:
            return msgspec.msgpack.decode(stored or b"", type=cls)
        except msgspec.DecodeError:
            return cls()


class CarefulReplay:
    """Notes the steps of one owner's replay, which may start over while the server is away."""

    def __init__(self, server: Server, lease_key: str, found: NotedSteps) -> None:
        """``found``: what the last replay wrote down, which came to no end."""
        self._server = server
        self._lease_key = lease_key
        self._found = found
        self._left_out = set(found.left_out)
        if found.tries >= MOST_DEATHS:
            self._left_out.add(found.step)

    async def begin(self, step: str) -> bool:
        """Note that the step begins. False: it must be left out. Raises redis-py's errors."""
        if step in self._left_out:
            return False
        tries = self._found.tries + 1 if step == self._found.step else 1
        noted = msgspec.msgpack.encode(NotedSteps(step, tries, sorted(self._left_out)))
        await run_script(self._server, scripts.note(self._lease_key, STEPS_FIELD, noted))
        return True

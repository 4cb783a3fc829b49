"""How many policies of one worker are at work at once: the runs take turns, a call each.

A policy may ask a model or a service, and hundreds of them at once would ask it too much. A run with many calls to be
judged side by side takes no more turns than one with a single call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class Seats:
    """A seat for each call of a policy that runs."""

    def __init__(self, most: int, *, reassure_s: float) -> None:
        """``most``: calls at once. ``reassure_s``: a run that waits for a seat is told so this often."""
        self._free = most
        self._reassure_s = reassure_s
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By run, the one whose turn is next first: what waits for a seat. None of them is empty."""

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return sum(len(calls) for calls in self._waiting.values())

    @asynccontextmanager
    async def seat(self, run: str, reassure: Callable[[], object]) -> AsyncGenerator[None]:
        """Holds a seat inside of this block. ``reassure`` is called while the run waits for it."""
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._wait(run, reassure)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, run: str, reassure: Callable[[], object]) -> None:
        seat = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, deque()).append(seat)
        try:
            while not (await asyncio.wait({seat}, timeout=self._reassure_s))[0]:
                reassure()
        except BaseException:
            if seat.done():
                self._pass_on()  # given and cancelled in one moment
            else:
                self._waiting[run].remove(seat)
                if not self._waiting[run]:
                    del self._waiting[run]
            raise

    def _pass_on(self) -> None:
        """To the run whose turn it is, which goes to the end of the row."""
        if not self._waiting:
            self._free += 1
            return
        run, calls = next(iter(self._waiting.items()))
        calls.popleft().set_result(None)
        if calls:
            self._waiting.move_to_end(run)
        else:
            del self._waiting[run]

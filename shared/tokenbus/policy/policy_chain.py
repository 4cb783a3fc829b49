"""One stream under its policies: chunks in, chunks out, each policy on what those before it let through.

What a policy adds is told to those after it like anything else. What goes in and out is decided by pure parts (reader,
assembler, writer); here they meet the policies, which may take their time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

from tokenbus.policy.policy_runner import BoundPolicy, PolicyRunner, Seat
from tokenbus.policy.processor import Decision
from tokenbus.policy.stream_format import StreamFormat

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")


class PolicyStream(Generic[C]):
    """One stream under a chain of policies. Not for use by two tasks at once.

    `feed` and `end` give what may go out by now. Where a policy put something off (`StreamContext.later`), more may
    come without a further chunk: wait for one of `pending`, then `collect`. `close` ends what is still under way.
    """

    def __init__(
        self,
        links: Sequence[BoundPolicy],
        dialect: StreamFormat[C],
        *,
        run: str = "",
        client: Client | None = None,
        seat: Seat = nullcontext,
    ) -> None:
        """``seat``: entered by each call of a policy, to bound how many there are at once."""
        self._links = [PolicyRunner(link, dialect, run, client, seat) for link in links]
        self._decisions: list[Decision] = []
        self.terminated: Decision | None = None
        """What ended the stream before its source did; the source is to be stopped then, and `feed` gives nothing."""

    async def feed(self, chunk: C) -> list[C]:
        """What goes out with the next chunk. Raises Malformed where the stream itself is broken."""
        return [] if self.terminated else await self._through(0, [chunk])

    async def end(self) -> list[C]:
        """What goes out now that the source has ended, with a finish reason or without; waits for what was put off."""
        return [] if self.terminated else await self._through(0, [], ended=True)

    @property
    def pending(self) -> list[asyncio.Future[object]]:
        """What was put off and is under way: of each policy the one that goes out next."""
        return [link.next_work for link in self._links if link.next_work]

    async def collect(self) -> list[C]:
        """What can go out by now of what was put off, in order."""
        out: list[C] = []
        for n, link in enumerate(self._links):
            if not self.terminated:
                out += await self._through(n + 1, link.collect(), ended=link.terminated is not None)
        return out

    def decisions(self) -> list[Decision]:
        """What the policies decided since this was last asked, in order."""
        taken, self._decisions = self._decisions, []
        return taken

    async def close(self) -> None:
        """End what is under way; what has not gone out by now is lost. Once closed, it is not used again."""
        for link in self._links:
            await link.close()

    async def _through(self, first: int, chunks: list[C], *, ended: bool = False) -> list[C]:
        """Hand chunks to the policies from this one on, and the end after them, where they are the last."""
        for link in self._links[first:]:
            out: list[C] = []
            for chunk in chunks:
                out += await link.feed(chunk)
            if ended:
                out += await link.end()
            ended = ended or link.terminated is not None
            chunks = out
        for link in self._links:
            self._decisions += link.take_decisions()
            self.terminated = self.terminated or link.terminated
        return chunks

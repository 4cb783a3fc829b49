"""One stream under a chain of policies: each policy gets the output of those before it.

Chunks that a policy adds reach later policies like any others. Pure parts (reader, assembler, writer) decide what goes
in and out; the asynchronous policy calls happen here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

from tokenbus.policy.policy_runner import BoundPolicy, PolicyRunner, Slot
from tokenbus.policy.processor import Decision
from tokenbus.policy.stream_format import StreamFormat

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")


class PolicyStream(Generic[C]):
    """One stream under a chain of policies. Use from one task at a time.

    `feed` and `end` return what may go out by now. If a policy deferred work (`StreamContext.later`), more output may
    follow without another chunk: wait for one of `pending`, then call `collect`. `close` cancels what is still running.
    """

    def __init__(
        self,
        links: Sequence[BoundPolicy],
        stream_format: StreamFormat[C],
        *,
        run: str = "",
        client: Client | None = None,
        slot: Slot = nullcontext,
    ) -> None:
        """``slot``: a context entered around each policy call; limits concurrent calls."""
        self._links = [PolicyRunner(link, stream_format, run, client, slot) for link in links]
        self._decisions: list[Decision] = []
        self.terminated: Decision | None = None
        """The decision that terminated the stream early. The caller should stop the source; `feed` returns nothing
        from then on.
        """

    async def feed(self, chunk: C) -> list[C]:
        """Return the output for the next chunk. Raises Malformed if the stream itself is broken."""
        return [] if self.terminated else await self._through(0, [chunk])

    async def end(self) -> list[C]:
        """Return the output at the end of the source, with or without a finish reason. Waits for deferred work."""
        return [] if self.terminated else await self._through(0, [], ended=True)

    @property
    def pending(self) -> list[asyncio.Future[object]]:
        """Running deferred work: for each policy, the item that goes out next."""
        return [link.next_work for link in self._links if link.next_work]

    async def collect(self) -> list[C]:
        """Return the output of finished deferred work, in order."""
        out: list[C] = []
        for n, link in enumerate(self._links):
            if not self.terminated:
                out += await self._through(n + 1, link.collect(), ended=link.terminated is not None)
        return out

    def decisions(self) -> list[Decision]:
        """Return and clear the decisions made since the last call, in order."""
        taken, self._decisions = self._decisions, []
        return taken

    async def close(self) -> None:
        """Cancel running work; its output is lost. Do not use the stream afterwards."""
        for link in self._links:
            await link.close()

    async def _through(self, first: int, chunks: list[C], *, ended: bool = False) -> list[C]:
        """Pass chunks through the policies from index ``first`` on; if ``ended``, then signal the end."""
        for link in self._links[first:]:
            out: list[C] = []
            for chunk in chunks:
                out += await link.feed(chunk)
            if ended:
                out += await link.end()
            ended = ended or link.terminated is not None
            chunks = out
        ended_by = next((n for n, link in enumerate(self._links) if link.terminated), None)
        for n, link in enumerate(self._links):
            if ended_by is not None and n < ended_by and not self.terminated:
                await link.conclude()
            self._decisions += link.take_decisions()
        if ended_by is not None and not self.terminated:
            self.terminated = self._links[ended_by].terminated
        return chunks

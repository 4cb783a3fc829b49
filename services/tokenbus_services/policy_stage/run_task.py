"""One run under its policies: drafts in, in order; steps out, as soon as they are known."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
import structlog

from tokenbus.client.client import Client
from tokenbus.events.frames import Decision, PolicyVerdict
from tokenbus.events.public import TERMINAL, PublicEvent
from tokenbus.policy.policy_chain import PolicyStream
from tokenbus.policy.policy_runner import BoundPolicy
from tokenbus.policy.processor import Decision as Said
from tokenbus.policy.public.format import PublicEvents
from tokenbus_services.policy_stage.call_slots import Seats
from tokenbus_services.policy_stage.provenance import Trace, TracedEvents

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

STEPS_A_RULING = 200
"""Most steps in one ruling."""

Tell = Callable[[str, list[PolicyVerdict]], Awaitable[bool]]
"""Tells steps of a run; False: nobody wants to know of it any more."""


class Judging:
    """A run's task. A slow policy holds up this run and no other. `start` it once; `close` ends it at any time."""

    def __init__(
        self,
        run: str,
        links: Callable[[], Sequence[BoundPolicy]],
        *,
        client: Client,
        tell: Tell,
        wanted: Callable[[str], Awaitable[bool]],
        waiting: Callable[[int], None],
        seats: Seats,
    ) -> None:
        """``wanted``: whether the run is still open, asked before its policies are first called, for they may be what
        ends their workers. ``waiting``: so many drafts more wait, or fewer. ``seats``: of all runs of this worker."""
        self.run = run
        self._links = links
        self._client = client
        self._tell = tell
        self._wanted = wanted
        self._waiting = waiting
        self._seats = seats
        self._reassuring = False
        """The run waits for a seat, and those who wait for it are to be told so."""
        self._drafts: deque[PublicEvent] = deque()
        self._more = asyncio.Event()
        self._steps: deque[PolicyVerdict] = deque()
        self._to_tell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, drafts: Sequence[PublicEvent]) -> None:
        """These come next."""
        self._drafts.extend(drafts)
        self._waiting(len(drafts))
        self._more.set()

    def start(self) -> None:
        """Begin, or go on."""
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"policies of {self.run}")

    def close(self) -> None:
        """The run needs no judgement any more."""
        self._waiting(-len(self._drafts))
        self._drafts.clear()
        if self._task:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until nothing of it is under way. Call it after `close`."""
        if self._task:
            await asyncio.wait({self._task})

    async def _work(self) -> None:
        try:
            if not await self._wanted(self.run):
                return
            async with asyncio.TaskGroup() as tasks:
                judging = tasks.create_task(self._judge())
                judging.add_done_callback(lambda _: self._to_tell.set())
                await self._telling(judging)
                judging.cancel()
        except Exception:
            # Nothing that a policy does: that is an error of the policy. The parser's patience ends the run.
            log.exception("judging_failed", run=self.run)

    async def _judge(self) -> None:
        trace = Trace()
        stream = PolicyStream(
            self._links(),
            TracedEvents(PublicEvents(lambda: 0), trace),
            run=self.run,
            client=self._client,
            seat=lambda: self._seats.seat(self.run, self._reassure),
        )
        try:
            while True:
                if stream.pending and not self._drafts:
                    await self._until_known(stream.pending)
                    self._put(trace, await stream.collect(), stream)
                if not self._drafts:
                    if not stream.pending:
                        self._more.clear()
                        await self._more.wait()
                    continue
                draft = self._drafts.popleft()
                self._waiting(-1)
                trace.draft(draft)
                out = await stream.feed(draft)
                if isinstance(draft, TERMINAL):
                    out += await stream.end()
                self._put(trace, out, stream)
                if isinstance(draft, TERMINAL) or stream.terminated:
                    return
        finally:
            await stream.close()

    def _reassure(self) -> None:
        self._reassuring = True
        self._to_tell.set()

    async def _until_known(self, pending: Sequence[asyncio.Future[object]]) -> None:
        """Something that was put off is known, or there are more drafts."""
        self._more.clear()
        more = asyncio.create_task(self._more.wait())
        try:
            await asyncio.wait({more, *pending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            more.cancel()
            with suppress(asyncio.CancelledError):
                await more

    def _put(self, trace: Trace, out: Sequence[PublicEvent], stream: PolicyStream[PublicEvent]) -> None:
        stream.decisions()  # the trace has them, each where it belongs
        ends: str | None = None
        if ended := stream.terminated:
            reason = ended.reason if ended.action == "terminate" else f"failed: {ended.reason}"
            ends = f"{ended.policy}: {reason}" if reason else ended.policy
        for known in trace.take(out):
            decisions = [_told(decision) for decision in known.decisions]
            step = PolicyVerdict(known.origin.draft, known.origin.part, known.later, known.events, decisions)
            self._steps.append(msgspec.structs.replace(step, ends=ends) if known.ends else step)
            self._to_tell.set()

    async def _telling(self, judging: asyncio.Task[None]) -> None:
        """Tell what is known, until all is judged; what becomes known meanwhile goes together next."""
        while self._steps or not judging.done():
            if not self._steps and not self._reassuring:
                self._to_tell.clear()
                await self._to_tell.wait()
                continue
            self._reassuring = False
            steps = [self._steps.popleft() for _ in range(min(len(self._steps), STEPS_A_RULING))]
            if not await self._tell(self.run, steps):
                return


def _told(said: Said) -> Decision:
    return Decision(
        said.policy, said.action, said.reason, said.block, said.tool_id, said.tool_name, said.original, said.final
    )

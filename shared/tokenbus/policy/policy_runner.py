"""Runs one policy on one stream, or a chain of policies in which each gets the output of those before it.

A runner calls its policy in order, enforces its timeout, and handles its errors.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import is_cancelled
from tokenbus.policy.processor import Decision, Deferred, NewText, NewToolCall, StreamContext, StreamProcessor, sendable
from tokenbus.policy.stream_format import (
    BlockBegan,
    BlockEnded,
    BlockGrew,
    BlocksVoided,
    CallNamed,
    Change,
    StreamFinished,
    StreamFormat,
)
from tokenbus.policy.stream_state import (
    ContentStreamBlock,
    OtherStreamBlock,
    ServerToolStreamBlock,
    StreamBlock,
    StreamState,
    ToolCallStreamBlock,
)

if TYPE_CHECKING:
    from tokenbus.client.client import Client


C = TypeVar("C")
T = TypeVar("T")

OnError = Literal["block", "pass"]
Slot: TypeAlias = Callable[[str], AbstractAsyncContextManager[object]]
"""Context entered for each call of the policy with this name; the call's timeout starts after entering."""

REASON_CHARS = 500
"""Maximum characters of a reported error."""


class Handling(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a stream if its policy fails."""

    on_error: OnError = "block"
    """``block``: the stream ends. ``pass``: it continues without this policy, and chunks that the policy held
    without a decision go out unchanged.
    """
    timeout_s: float = 30.0
    """Seconds that one call, or one deferred work item, may take; exceeding it is an error."""


class BoundPolicy(msgspec.Struct, frozen=True):
    """A policy in a chain. The instance belongs to one stream only."""

    name: str
    policy: StreamProcessor
    handling: Handling = Handling()


class PolicyRunner(Generic[C]):
    """One element of a `PolicyStream`; see there."""

    def __init__(
        self,
        link: BoundPolicy,
        stream_format: StreamFormat[C],
        run: str,
        client: Client | None,
        slot: Slot = nullcontext,
    ) -> None:
        self._name = link.name
        self._policy = link.policy
        self._handling = link.handling
        self._slot = slot
        self._words = stream_format.words
        self._reader = stream_format.reader()
        self._writer = stream_format.writer()
        self._assembler = BlockAssembler()
        self._context = StreamContext(run, link.name, stream_format.words, client)
        self._works: deque[_Work[C]] = deque()
        self._held: dict[int, tuple[int | None, C]] = {}
        """By key: block and chunk of each chunk neither sent nor decided on. Kept only if ``on_error`` is ``pass``."""
        self._out_of_work = False
        """Whether the policy failed and the stream continues without it."""
        self._decisions: list[Decision] = []
        self._ending: list[C] = []
        """The final chunk and usage after it; they wait for the output of `on_end`."""
        self.terminated: Decision | None = None

    @property
    def next_work(self) -> asyncio.Future[Any] | None:
        return self._works[0].task if self._works and not self.terminated else None

    def take_decisions(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken

    async def feed(self, chunk: C) -> list[C]:
        out = self.collect()
        for piece in self._reader.read(chunk):
            if piece.waits:
                out += await self.finish_deferred()
            if self.terminated:
                break
            self._assembler.apply(piece.changes, piece.block)
            self._writer.before_chunk(piece.chunk)
            if self._out_of_work:
                out += self._written(piece.chunk)
                continue
            if self._handling.on_error == "pass":
                self._held[self._words.key(piece.chunk)] = piece.block, piece.chunk
            state = self._assembler.state
            call = partial(self._policy.on_chunk, piece.chunk, state, self._context)
            out += await self._call(call, waits=piece.waits)
        return out

    async def end(self) -> list[C]:
        out = await self.finish_deferred()
        if not self.terminated and not self._out_of_work:
            self._assembler.apply([])
            call = partial(self._policy.on_end, self._assembler.state, self._context)
            out += await self._call(call, waits=True)
        if not self.terminated:
            ending, self._ending = self._ending, []
            out += [written for chunk in ending for written in self._writer.write(chunk)]
        return out

    async def conclude(self) -> None:
        """Let the policy record its decisions, because a later one ended the stream. What it sends is dropped."""
        if not self._out_of_work:
            self._assembler.apply([])
            await self._call(partial(self._policy.on_end, self._assembler.state, self._context), waits=False)

    async def finish_deferred(self) -> list[C]:
        out = self.collect()
        while self._works and not self.terminated:
            await asyncio.wait({self._works[0].task})
            out += self.collect()
        return out

    def collect(self) -> list[C]:
        out: list[C] = []
        while self._works and self._works[0].task.done() and not self.terminated:
            work = self._works.popleft()
            self._writer.resume_deferred(work.mark)
            also = self._take(work.decisions)
            try:
                sent = [sendable(self._words, item) for item in work.task.result()]
            except (Exception, asyncio.CancelledError) as e:  # nothing here cancels work before it is collected
                self._fault(e)
                if self._handling.on_error == "block":
                    return out + self._stop(self._decisions[-1])
                sent = work.holding
            for item in sent:
                out += self._written(item)
            out += self._out(also)
        return out

    async def close(self) -> None:
        tasks = [work.task for work in self._works]
        self._works.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, call: Callable[[], Awaitable[None]], *, waits: bool) -> list[C]:
        """Call the policy and return its output; if ``waits``, all deferred output comes first."""
        error: BaseException | None = None
        try:
            async with self._slot(self._name):
                await _in_time(call, self._handling.timeout_s)
        except Exception as e:
            error = e
        except asyncio.CancelledError as e:  # of this task, or of something that the policy awaited: its own error
            if is_cancelled():
                raise
            error = e
        sent = self._take()
        out = await self.finish_deferred() if waits else []
        return [*out, *self._out(sent), *(self._failed(error) if error else ())]

    def _take(self, decided: Iterable[Decision] = ()) -> list[C | NewText | NewToolCall]:
        """Return what the policy sent, and start its deferred work. ``decided``: decisions of a deferred work item."""
        taken = self._context.take()
        decisions = [*decided, *taken.decisions]
        if self._held:
            self._release(taken.dealt_with, decisions)
        timeout_s, context, slot = self._handling.timeout_s, self._context, partial(self._slot, self._name)
        self._works.extend(_Work(work, timeout_s, self._writer.defer(), context, slot) for work in taken.later)
        for decision in decisions:
            self._decide(decision)
        return taken.sent

    def _decide(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._writer.decided(decision)

    def _out(self, sent: Iterable[C | NewText | NewToolCall]) -> list[C]:
        if self.terminated:
            return []
        out = [chunk for item in sent for chunk in self._written(item)]
        if self._context.terminated:
            out += self._stop(next(d for d in reversed(self._decisions) if d.action == "terminate"))
        return out

    def _release(self, dealt_with: Iterable[int], decisions: Iterable[Decision]) -> None:
        """Release chunks that were dealt with or decided on."""
        for key in dealt_with:
            self._held.pop(key, None)
        if decided := {decision.block for decision in decisions if decision.block is not None}:
            self._held = {key: held for key, held in self._held.items() if held[0] not in decided}

    def _failed(self, error: BaseException) -> list[C]:
        if self.terminated:
            return []
        self._fault(error)
        if self._handling.on_error == "block":
            return self._stop(self._decisions[-1])
        self._out_of_work = True
        held, self._held = self._held, {}
        return [out for _, chunk in held.values() for out in self._written(chunk)]

    def _written(self, item: C | NewText | NewToolCall) -> Sequence[C]:
        """Return the output for one sent item."""
        if not isinstance(item, NewText | NewToolCall):
            words = self._words
            if words.is_end(item) or (self._ending and words.is_metadata(item)):
                self._ending.append(item)
                return ()
        return self._writer.write(item)

    def _fault(self, error: BaseException) -> None:
        what = f"no answer in {self._handling.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        reason = f"{type(error).__name__}: {what}"[:REASON_CHARS]
        self._decide(Decision(policy=self._name, action="error", reason=reason))

    def _stop(self, decision: Decision) -> list[C]:
        self.terminated = decision
        for work in self._works:
            work.task.cancel()
        self._ending = []
        return list(self._writer.terminate(decision))


class _Work(Generic[C]):
    """A running deferred work item."""

    def __init__(
        self,
        later: Deferred[C],
        timeout_s: float,
        mark: object,
        context: StreamContext[C],
        slot: Callable[[], AbstractAsyncContextManager[object]],
    ) -> None:
        self.mark = mark
        self.holding: list[C | NewText | NewToolCall] = [*later.holding]
        self.decisions: list[Decision] = []
        self.task: asyncio.Task[list[C | NewText | NewToolCall | str]] = asyncio.ensure_future(
            self._within(later.work, timeout_s, context, slot)
        )

    async def _within(
        self,
        work: Awaitable[Iterable[C | NewText | NewToolCall | str]],
        timeout_s: float,
        context: StreamContext[C],
        slot: Callable[[], AbstractAsyncContextManager[object]],
    ) -> list[C | NewText | NewToolCall | str]:
        try:
            with context.putting_off(self.decisions):
                async with slot():
                    return list(await _in_time(lambda: work, timeout_s))
        finally:
            _unused(work)


async def _in_time(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Await the call. Raises TimeoutError also if the call ignored its cancellation and finished late."""
    async with process_clock.timeout(timeout_s) as limit:
        given = await call()
    if limit.expired():
        raise TimeoutError
    return given


def _unused(call: object) -> None:
    """Close a coroutine that was never started; Python warns about one that is never awaited."""
    if isinstance(call, Coroutine):
        cast("Coroutine[Any, Any, Any]", call).close()


class BlockAssembler:
    """The state of one stream, updated in place: a policy that keeps a reference sees the updates."""

    def __init__(self) -> None:
        self.state = StreamState()
        self._blocks: dict[int, StreamBlock] = {}

    def apply(self, changes: Iterable[Change], block: int | None = None) -> None:
        """Apply the changes of one chunk, which is part of ``block``."""
        self.state.just_completed = self.state.just_cut = None
        for change in changes:
            self._apply(change)
        self.state.chunk_block = None if block is None else self._blocks[block]

    def _apply(self, change: Change) -> None:
        state = self.state
        match change:
            case BlockBegan():
                state.current_block = self._blocks[change.number] = block = _block(change)
                state.blocks.append(block)
            case BlockGrew():
                state.current_block = block = self._blocks[change.number]
                block.grow(change.text)
            case CallNamed():
                block = self._blocks[change.number]
                assert isinstance(block, ToolCallStreamBlock)
                block.id, block.name = change.id, change.name
            case BlockEnded():
                state.current_block = block = self._blocks[change.number]
                if change.cut:
                    state.just_cut = block
                else:
                    block.is_complete = True
                    state.just_completed = block
            case BlocksVoided():
                state.blocks[:] = [block for block in state.blocks if block.number < change.since]
                self._blocks = {block.number: block for block in state.blocks}
                if state.current_block not in state.blocks:
                    state.current_block = None
            case StreamFinished():
                state.finish_reason = change.reason


def _block(began: BlockBegan) -> StreamBlock:
    match began.kind:
        case "text":
            return ContentStreamBlock(began.id or f"content_{began.number}", began.number)
        case "tool_call":
            return ToolCallStreamBlock(began.id, began.number, index=began.index, name=began.name)
        case "server_tool":
            return ServerToolStreamBlock(began.id or f"server_tool_{began.number}", began.number, name=began.name)
        case kind:
            return OtherStreamBlock(began.id or f"{kind}_{began.number}", began.number, other_kind=kind)


# Chunks that a policy adds reach later policies like any others. Pure parts (reader, assembler, writer) decide what
# goes in and out; the asynchronous policy calls happen here.


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
        """Running deferred work: for each policy, the next item to go out."""
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

"""A stream under policies, as an iterator over another: of a run's public events, or of OpenAI-style chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tokenbus.events.public import Event
from tokenbus.policy.openai.format import OpenAIChunks
from tokenbus.policy.policy_chain import PolicyStream
from tokenbus.policy.policy_runner import BoundPolicy
from tokenbus.policy.processor import Decision, Function, FunctionPolicy, StreamProcessor
from tokenbus.policy.public.format import PublicEvents

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")
OnDecision = Callable[[Decision], None]


Policy: TypeAlias = StreamProcessor | type[StreamProcessor] | Function | BoundPolicy
"""A policy, its class, a function in place of `StreamProcessor.on_chunk`, or a link that says how errors end."""


async def apply_policies(
    stream: AsyncIterable[C],
    *policies: Policy,
    run: str = "",
    client: Client | None = None,
    on_decision: OnDecision | None = None,
) -> AsyncGenerator[C]:
    """A stream under these policies, in their order: one run's events, as `Client.follow` or `Client.stream` gives
    them, or OpenAI-style chunks (the OpenAI SDK's, LiteLLM's, or mappings).

    What the policies withhold does not come out; what comes out is a sound stream. A stream that a policy ends is
    `Incomplete` with the error `policy_terminated`, as on the bus; in chunks its finish reason is ``content_filter``.
    Of events ``seq`` counts anew and is no cursor of the run.

    ``run``: what policies hear as the stream's name; of events it is the run's id. With a ``client`` a policy can ask
    the bus, and a run that one of them ends is cancelled; without, only the listening ends. The source is closed with
    this. Raises Malformed for chunks that no policy could judge, TypeError for what is no policy, and what the source
    raises, after what came before.
    """
    began = time.monotonic()

    def elapsed_ms() -> int:
        return round((time.monotonic() - began) * 1000)

    links = _links(policies)
    async with _closing(stream) as source:
        first = await _next(source)
        if isinstance(first, _End):
            return
        on_bus = isinstance(first, Event)
        name = first.run if on_bus else run
        stream_format: Any = PublicEvents(elapsed_ms) if on_bus else OpenAIChunks()
        policed: PolicyStream[Any] = PolicyStream(links, stream_format, run=name, client=client)

        async def stop() -> None:
            if on_bus and client and policed.terminated:
                await client.cancel(name, f"policy {policed.terminated.policy}")

        async with aclosing(_under(_from(first, source), policed, on_decision, stop)) as out:
            async for item in out:
                yield item


def _links(policies: Sequence[Policy]) -> list[BoundPolicy]:
    return [_link(policy) for policy in policies]


def _link(policy: Policy) -> BoundPolicy:
    match policy:
        case BoundPolicy():
            return policy
        case StreamProcessor():
            return BoundPolicy(type(policy).__name__, policy)
        case type():
            return _link(policy())
        case _ if callable(policy):
            return BoundPolicy(getattr(policy, "__name__", type(policy).__name__), FunctionPolicy(policy))
        case _:
            problem = "give a StreamProcessor, an async function of (chunk, state, context) or a Link"
            raise TypeError(f"{policy!r} is no policy: {problem}")


async def _under(
    source: AsyncIterable[C],
    stream: PolicyStream[C],
    on_decision: OnDecision | None,
    stop: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[C]:
    """What the policies let out, as soon as they do, whether the source goes on or not."""
    coming: asyncio.Task[C | _End] | None = None
    async with _closing(source) as chunks:
        try:
            ended = False
            while not ended and not stream.terminated:
                if coming or stream.pending:
                    coming = coming or asyncio.ensure_future(_next(chunks))
                    await asyncio.wait({coming, *stream.pending}, return_when=asyncio.FIRST_COMPLETED)
                if coming and not coming.done():
                    out = await stream.collect()
                else:
                    chunk = coming.result() if coming else await _next(chunks)
                    coming = None
                    ended = isinstance(chunk, _End)
                    out = await (stream.end() if isinstance(chunk, _End) else stream.feed(chunk))
                if stream.terminated and stop:
                    await stop()
                for decision in stream.decisions():
                    if on_decision:
                        on_decision(decision)
                for chunk in out:
                    yield chunk
        finally:
            if coming:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            await stream.close()


async def _from(first: C, rest: AsyncIterator[C]) -> AsyncGenerator[C]:
    yield first
    async for chunk in rest:
        yield chunk


class _End:
    """The source has ended."""


_END = _End()


async def _next(chunks: AsyncIterator[C]) -> C | _End:
    return await anext(chunks, _END)


@asynccontextmanager
async def _closing(source: AsyncIterable[C]) -> AsyncGenerator[AsyncIterator[C]]:
    """The source's iterator, closed at the end in whichever way it can be."""
    chunks = aiter(source)
    try:
        yield chunks
    finally:
        close = getattr(source, "aclose", None) or getattr(source, "close", None)
        if close:
            await close()

"""A stream under policies, as an iterator over any other: of a run's public events, or of OpenAI-style chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tokenbus.events.public import PublicEvent
from tokenbus.policy.link import Link
from tokenbus.policy.openai_chunks import OpenAIChunks
from tokenbus.policy.processor import Decision, StreamProcessor
from tokenbus.policy.public_events import PublicEvents
from tokenbus.policy.stream import PolicyStream

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")
OnDecision = Callable[[Decision], None]


async def screened(
    events: AsyncIterable[PublicEvent],
    *policies: StreamProcessor | Link,
    client: Client | None = None,
    on_decision: OnDecision | None = None,
) -> AsyncGenerator[PublicEvent]:
    """One run's events, as `Client.follow` or `Client.stream` gives them, under these policies in their order.

    ``seq`` counts anew and is no cursor of the run. With a ``client`` a policy can ask the bus, and a run that one of
    them ends is cancelled; without, only the listening ends. The stream is for this listener: what the bus itself must
    not say to anybody is the policy stage's matter. Raises what the source raises, after what came before.
    """
    began = time.monotonic()

    def elapsed_ms() -> int:
        return round((time.monotonic() - began) * 1000)

    async with _closing(events) as source:
        first = await _next(source)
        if isinstance(first, _End):
            return
        run = first.run
        stream = PolicyStream(_links(policies), PublicEvents(elapsed_ms), run=run, client=client)

        async def stop() -> None:
            if client and stream.terminated:
                await client.cancel(run, f"policy {stream.terminated.policy}")

        async with aclosing(_under(_from(first, source), stream, on_decision, stop)) as out:
            async for event in out:
                yield event


async def screened_chunks(
    chunks: AsyncIterable[C],
    *policies: StreamProcessor | Link,
    run: str = "",
    client: Client | None = None,
    on_decision: OnDecision | None = None,
) -> AsyncGenerator[C]:
    """OpenAI-style chunks (the OpenAI SDK's, LiteLLM's, or mappings) under these policies in their order.

    The source is closed with this, and as soon as a policy ends the stream. Raises Malformed for chunks that no policy
    could judge, and what the source raises.
    """
    stream: PolicyStream[Any] = PolicyStream(_links(policies), OpenAIChunks(), run=run, client=client)
    async with aclosing(_under(chunks, stream, on_decision)) as out:
        async for chunk in out:
            yield chunk


def _links(policies: Sequence[StreamProcessor | Link]) -> list[Link]:
    return [policy if isinstance(policy, Link) else Link(type(policy).__name__, policy) for policy in policies]


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

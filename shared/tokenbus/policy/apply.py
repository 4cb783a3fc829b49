"""Applies policies to an iterator: of a run's public events, or of OpenAI-style chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tokenbus.bus.liveness import stop_task
from tokenbus.events.public import Event
from tokenbus.policy.openai import OpenAIChunks
from tokenbus.policy.policy_runner import BoundPolicy, PolicyStream
from tokenbus.policy.processor import Decision, Function, FunctionPolicy, StreamProcessor
from tokenbus.policy.public import PublicEvents

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")
OnDecision = Callable[[Decision], None]


Policy: TypeAlias = StreamProcessor | type[StreamProcessor] | Function | BoundPolicy
"""A policy, its class, a function in place of `StreamProcessor.on_chunk`, or a `BoundPolicy` with error handling."""


async def apply_policies(
    stream: AsyncIterable[C],
    *policies: Policy,
    run: str = "",
    client: Client | None = None,
    on_decision: OnDecision | None = None,
) -> AsyncGenerator[C]:
    """Yield a stream as these policies let it through, applied in order.

    The stream is one run's events, as from `Client.follow` or `Client.stream`, or OpenAI-style chunks (of the OpenAI
    SDK, of LiteLLM, or mappings). Whatever the policies withhold is dropped; the output is always a well-formed stream.
    If a policy terminates it, events end with `Incomplete` and the error `policy_terminated`, as on the bus; chunks end
    with finish reason ``content_filter``. Output events get new ``seq`` numbers, which are not cursors of the run.

    ``run``: the stream's name for policies; for events it is the run's id. With a ``client``, policies can use the bus,
    and a run that a policy terminates is cancelled; without one, only this iteration ends. The source is closed on
    exit. Raises Malformed for chunks that no policy could judge, TypeError for an invalid policy, and whatever the
    source raises, after the output before it.
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
            raise TypeError(f"{policy!r} is not a policy: {problem}")


async def _under(
    source: AsyncIterable[C],
    stream: PolicyStream[C],
    on_decision: OnDecision | None,
    stop: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[C]:
    """Yield the policies' output as soon as it is available, even while the source is silent."""
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
            await stop_task(coming)
            await stream.close()


async def _from(first: C, rest: AsyncIterator[C]) -> AsyncGenerator[C]:
    yield first
    async for chunk in rest:
        yield chunk


class _End:
    """Marks the end of the source."""


_END = _End()


async def _next(chunks: AsyncIterator[C]) -> C | _End:
    return await anext(chunks, _END)


@asynccontextmanager
async def _closing(source: AsyncIterable[C]) -> AsyncGenerator[AsyncIterator[C]]:
    """The source's iterator; closes the source on exit if it can be closed."""
    chunks = aiter(source)
    try:
        yield chunks
    finally:
        close = getattr(source, "aclose", None) or getattr(source, "close", None)
        if close:
            await close()

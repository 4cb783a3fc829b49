"""A synchronous client for scripts and notebooks: plain calls and generators over an event loop in its own thread.

    from tokenbus.sync import Client

    with Client("redis://localhost:6379") as bus:
        for event in bus.stream({"provider": "anthropic", "model": "…", "messages": […]}):
            ...

Each method behaves like its namesake in `tokenbus.Client`. Calls are thread-safe; Ctrl-C ends the waiting call, and
leaving ``with`` ends everything. A call costs about 0.1 ms more than the asynchronous one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, BlobRef
from tokenbus.bus.keys import DEFAULT_PREFIX, SubscribedTopic
from tokenbus.client import client as asynchronous
from tokenbus.client.blobs import Blobs as AsyncBlobs
from tokenbus.client.decode import TopicEvent
from tokenbus.client.response import Response
from tokenbus.client.run import PUBLISHED_WAIT_S
from tokenbus.client.run import Run as AsyncRun
from tokenbus.client.run_list import StateFilter
from tokenbus.client.subscriptions.cursor import Cursor
from tokenbus.client.subscriptions.event_filter import Classes, K, Kinds
from tokenbus.client.subscriptions.factory import Begin, Delivery, Reading
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.ordered import OrderedSubscription
from tokenbus.client.subscriptions.sentences import Sentence, SentenceSubscription
from tokenbus.client.subscriptions.subscriber import HOLD_S
from tokenbus.core.request.parse import MAX_REQUEST_BYTES
from tokenbus.events.decisions import Decided
from tokenbus.events.public import (
    BlockTopicEvent,
    ChunkTopicEvent,
    PublicEvent,
    RunTopicEvent,
    UnknownEvent,
)
from tokenbus.events.requests import Generate, Message
from tokenbus.events.run_info import RunInfo
from tokenbus.shaping.sentences import SentenceRules

__all__ = ["Blobs", "Client", "Run", "Subscription"]

T = TypeVar("T")
E = TypeVar("E", bound=TopicEvent | Sentence)


class _Loop:
    """An event loop that runs in its own thread."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="tokenbus", daemon=True)
        self._thread.start()
        self._started.wait()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._started.set()
        await self._over.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result. Cancels it if this thread is interrupted. Raises RuntimeError after
        `close`.
        """
        if self._loop is None:
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop and self._over:
            loop.call_soon_threadsafe(self._over.set)
            self._thread.join()


class Client:
    """A connection to a tokenbus deployment. Use as ``with Client() as bus``; arguments as in `tokenbus.Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        partitions: int | None = None,
        reconnect_s: float = 30.0,
        max_waiting: int = asynchronous.MAX_WAITING,
        max_queued: int = asynchronous.MAX_QUEUED,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        blobs: str | None = None,
        blob_token: str | None = None,
    ) -> None:
        """Configure the client; does not connect yet. Raises SettingsError for an invalid address or setting."""
        self._bus = asynchronous.Client(
            url,
            prefix=prefix,
            partitions=partitions,
            reconnect_s=reconnect_s,
            max_waiting=max_waiting,
            max_queued=max_queued,
            max_request_bytes=max_request_bytes,
            blobs=blobs,
            blob_token=blob_token,
        )
        self._loop: _Loop | None = None

    def __enter__(self) -> Self:
        self._loop = _Loop()
        try:
            self._loop.call(self._bus.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and stop the thread; runs continue. Generators still in use raise RuntimeError."""
        if self._loop:
            try:
                self._loop.call(self._bus.aclose())
            finally:
                self._loop.close()

    @property
    def blobs(self) -> Blobs:
        """The deployment's blob store. Raises SettingsError like `tokenbus.Client.blobs`."""
        return Blobs(self)

    def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """Publish a request and return its run once the server has stored it.

        Raises RequestInvalid, RequestTooLarge, PublishQueueFull, ServerUnavailable and ServerFull, as
        `tokenbus.Client.publish` does.
        """
        return Run(self._call(self._bus.publish(request, wait=wait)), self)

    def stream(
        self, request: Generate | Mapping[str, object], *, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> Generator[PublicEvent]:
        """Publish a request, at once, and yield all its events, the terminal event last.

        Raises like `publish` and `follow`. See `tokenbus.Client.stream`.
        """
        return self.publish(request).events(wait_s=wait_s)

    def follow(
        self, run: Run | str, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> Generator[PublicEvent]:
        """Yield a run's events after seq ``after``, first the stored ones, then live: none missing, none twice.

        ``wait_s``: seconds to wait for a run that is still unknown. Raises RunNotFound, CursorTrimmed, CursorAhead,
        ValueError and ServerUnavailable, as `tokenbus.Client.follow` does.
        """
        return self._each(lambda: self._bus.follow(_id(run), after=after, wait_s=wait_s))

    def result(self, run: Run | str, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run to end and return its events folded into a response.

        Raises RunFailed, RunIncomplete, RunCancelled, Malformed, and the errors of `follow`. See
        `tokenbus.Client.result`.
        """
        return self._call(self._bus.result(_id(run), wait_s=wait_s))

    def messages(self, run: Run | str, *, wait_s: float | None = 10.0) -> list[Message]:
        """Wait for the run to end, however it ends, and return its output as ``messages`` for the next request.

        Raises Malformed and the errors of `follow`. See `tokenbus.Client.messages`.
        """
        return self._call(self._bus.messages(_id(run), wait_s=wait_s))

    def cancel(self, run: Run | str, reason: str | None = None, *, heard_through: int | None = None) -> None:
        """Ask for the run to be stopped, also at the provider. Returns once the server has the request.

        Raises RequestInvalid, ServerUnavailable and ServerFull, as `tokenbus.Client.cancel` does.
        """
        self._call(self._bus.cancel(_id(run), reason, heard_through=heard_through))

    def retry(self, run: Run | str, *, again: int = 1) -> Run:
        """Publish the request of an incomplete, failed or cancelled run again, as a new run.

        Raises RunOpen, RunNotFound, RunNotRepeatable, and the errors of `publish`. See `tokenbus.Client.retry`.
        """
        return Run(self._call(self._bus.retry(_id(run), again=again)), self)

    def resume(self, run: Run | str, *, again: int = 1) -> Run:
        """Continue from the visible text of the last turn of an incomplete, failed or cancelled run, as a new run.

        Raises the same errors as `retry`. See `tokenbus.Client.resume`.
        """
        return Run(self._call(self._bus.resume(_id(run), again=again)), self)

    def runs(
        self,
        *,
        state: StateFilter | Collection[StateFilter] | None = None,
        tenant: str | None = None,
        provider: str | None = None,
        older_than: float | timedelta | None = None,
        prefix: str | None = None,
        limit: int | None = None,
        oldest_first: bool = False,
    ) -> Generator[RunInfo]:
        """Yield the deployment's runs, open and ended, the newest first.

        ``older_than``: seconds, or a timedelta. Raises ValueError and ServerUnavailable. See `tokenbus.Client.runs`.
        """
        return self._each(
            lambda: self._bus.runs(
                state=state,
                tenant=tenant,
                provider=provider,
                older_than=older_than,
                prefix=prefix,
                limit=limit,
                oldest_first=oldest_first,
            )
        )

    def describe(self, runs: Iterable[Run | str]) -> dict[str, RunInfo]:
        """Return a `RunInfo` for each of these runs that is known, by run id.

        Raises RequestInvalid and ServerUnavailable, as `tokenbus.Client.describe` does.
        """
        return self._call(self._bus.describe([_id(run) for run in runs]))

    @overload
    def subscribe(
        self,
        topic: Literal["visible", "chunks"],
        *,
        group: str | None = None,
        from_: Begin = "now",
        **how: Unpack[Reading],
    ) -> Subscription[ChunkTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: str | None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> Subscription[BlockTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: str | None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> Subscription[RunTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["decisions"], *, group: str | None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> Subscription[Decided | UnknownEvent]: ...
    @overload
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        kinds: Classes[K],
        group: str | None = None,
        from_: Begin = "now",
        **how: Unpack[Delivery],
    ) -> Subscription[K]: ...
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        kinds: Kinds[Any] = None,
        group: str | None = None,
        from_: Begin = "now",
        **how: Unpack[Delivery],
    ) -> Subscription[Any]:
        """Subscribe to a topic's events of all runs. Enter it with ``with`` and iterate.

        Takes the arguments of `tokenbus.Client.subscribe`. Raises ValueError for invalid ones.
        """
        subscribe: Any = self._bus.subscribe
        return Subscription(self, subscribe(topic, kinds=kinds, group=group, from_=from_, **how))

    def sentences(
        self,
        *,
        group: str | None = None,
        from_: Begin = "now",
        rules: SentenceRules | None = None,
        hold_s: float = HOLD_S,
        **how: Unpack[Delivery],
    ) -> Subscription[Sentence]:
        """Subscribe to the visible text of all runs as sentences, for speech. Enter it with ``with`` and iterate.

        Takes the arguments of `tokenbus.Client.sentences`. Raises ValueError for invalid ones.
        """
        return Subscription(self, self._bus.sentences(group=group, from_=from_, rules=rules, hold_s=hold_s, **how))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("the client is not open: use it inside `with`")
        return self._loop.call(work)

    def _each(self, events: Callable[[], AsyncIterator[T]]) -> Generator[T]:
        source = events()  # raise here rather than at the first iteration

        def each() -> Generator[T]:
            try:
                while True:
                    try:
                        event = self._call(_next(source))
                    except StopAsyncIteration:
                        return
                    yield event
            finally:
                with suppress(RuntimeError):  # already closed with the client
                    self._call(_close(source))

        return each()


class Blobs:
    """The deployment's blob store; see `tokenbus.Client.blobs`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, content: bytes | Iterable[bytes], media_type: str = DEFAULT_MEDIA_TYPE) -> BlobRef:
        """Store content, whole or in pieces that are read as they are sent. Raises like `tokenbus.Client.blobs.put`."""
        pieces = content if isinstance(content, bytes) else _pieces(content)
        return self._client._call(self._blobs.put(pieces, media_type))  # pyright: ignore[reportPrivateUsage]

    def get(self, blob_id: str) -> bytes:
        """Return a blob's whole content. Raises like `tokenbus.Client.blobs.get`."""
        return self._client._call(self._blobs.get(blob_id))  # pyright: ignore[reportPrivateUsage]

    def chunks(self, blob_id: str) -> Generator[bytes]:
        """Yield a blob's content in pieces. Raises like `tokenbus.Client.blobs.chunks`."""
        return self._client._each(lambda: self._blobs.chunks(blob_id))  # pyright: ignore[reportPrivateUsage]

    @property
    def _blobs(self) -> AsyncBlobs:
        return self._client._bus.blobs  # pyright: ignore[reportPrivateUsage] - of this module


async def _pieces(content: Iterable[bytes]) -> AsyncGenerator[bytes]:
    pieces = iter(content)
    # In a thread, because it may read a file.
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


class Run:
    """One published run; see `tokenbus.Run`."""

    def __init__(self, run: AsyncRun, client: Client) -> None:
        self.id = run.id
        self._client = client

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def events(self, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S) -> Generator[PublicEvent]:
        """Yield the run's events after seq ``after``, then live. Raises the same errors as `Client.follow`."""
        return self._client.follow(self, after=after, wait_s=wait_s)

    def result(self, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run to end and return its response. Raises the same errors as `Client.result`."""
        return self._client.result(self, wait_s=wait_s)

    def messages(self, *, wait_s: float | None = PUBLISHED_WAIT_S) -> list[Message]:
        """Wait for the run to end and return its output as messages. Raises the same errors as `Client.messages`."""
        return self._client.messages(self, wait_s=wait_s)

    def cancel(self, reason: str | None = None, *, heard_through: int | None = None) -> None:
        """Ask for the run to be stopped, also at the provider. Raises the same errors as `Client.cancel`."""
        self._client.cancel(self, reason, heard_through=heard_through)


class Subscription(Generic[E]):
    """The events of a topic, or sentences. Enter it with ``with`` and iterate over it."""

    def __init__(
        self, client: Client, events: OrderedSubscription[Any] | SharedSubscription[Any] | SentenceSubscription
    ) -> None:
        self._client = client
        self._events: Any = events

    @property
    def cursor(self) -> Cursor:
        """The position from which another subscription can continue; see `tokenbus.OrderedSubscription.cursor`.

        Raises RuntimeError if the subscription has not started.
        """
        return self._events.cursor

    def __enter__(self) -> Self:
        self._call(self._events.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._events.__aexit__(kind, error, trace))

    def close(self) -> None:
        """End the subscription: iteration ends and the connection is released."""
        self._call(self._events.aclose())

    def ack(self, event: E) -> None:
        """Mark the event as done (``ack="explicit"``). Does nothing if it is not in flight."""
        self._call(_called(self._events.ack, event))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> E:
        try:
            return self._call(self._events.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._client._call(work)  # pyright: ignore[reportPrivateUsage] - of this module


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


async def _close(source: Any) -> None:
    await source.aclose()


async def _called(function: Callable[[T], None], value: T) -> None:
    function(value)


def _id(run: Run | str) -> str:
    return run.id if isinstance(run, Run) else run

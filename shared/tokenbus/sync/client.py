"""The synchronous client: the methods of `tokenbus.Client`, each called on an event loop in its own thread."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from tokenbus.bus.keys import DEFAULT_PREFIX, SubscribedTopic
from tokenbus.client import client as asynchronous
from tokenbus.client.response import Response
from tokenbus.client.run import PUBLISHED_WAIT_S
from tokenbus.client.run_list import StateFilter
from tokenbus.client.subscriptions.block_sentences import Sentence
from tokenbus.client.subscriptions.event_filter import Classes, K, Kinds
from tokenbus.client.subscriptions.factory import Begin, DeliveryOptions, Reading
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
from tokenbus.sync.blobs import Blobs
from tokenbus.sync.loop_thread import LoopThread
from tokenbus.sync.run import Run
from tokenbus.sync.subscription import Subscription


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
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        self._loop.start()
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
        if self._loop.was_started:
            try:
                self._loop.call(self._bus.aclose())
            finally:
                self._loop.close()

    @property
    def blobs(self) -> Blobs:
        """The deployment's blob store. Raises SettingsError like `tokenbus.Client.blobs`."""
        return Blobs(self._loop, self._bus)

    def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """Publish a request and return its run once the server has stored it.

        Raises RequestInvalid, RequestTooLarge, PublishQueueFull, ServerUnavailable and ServerFull, as
        `tokenbus.Client.publish` does.
        """
        return Run(self._loop.call(self._bus.publish(request, wait=wait)), self)

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
        return self._loop.each(lambda: self._bus.follow(_id(run), after=after, wait_s=wait_s))

    def result(self, run: Run | str, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run to end and return its events folded into a response.

        Raises RunFailed, RunIncomplete, RunCancelled, Malformed, and the errors of `follow`. See
        `tokenbus.Client.result`.
        """
        return self._loop.call(self._bus.result(_id(run), wait_s=wait_s))

    def messages(
        self,
        run: Run | str,
        *,
        wait_s: float | None = PUBLISHED_WAIT_S,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> list[Message]:
        """Wait for the run to end, however it ends, and return its output as ``messages`` for the next request.

        Raises Malformed, RequestInvalid and the errors of `follow`. See `tokenbus.Client.messages`.
        """
        heard = {"heard_through": heard_through, "heard_characters": heard_characters}
        return self._loop.call(self._bus.messages(_id(run), wait_s=wait_s, **heard))

    def cancel(
        self,
        run: Run | str,
        reason: str | None = None,
        *,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> None:
        """Ask for the run to be stopped, also at the provider. Returns once the server has the request.

        Raises RequestInvalid, ServerUnavailable and ServerFull, as `tokenbus.Client.cancel` does.
        """
        heard = {"heard_through": heard_through, "heard_characters": heard_characters}
        self._loop.call(self._bus.cancel(_id(run), reason, **heard))

    def retry(self, run: Run | str, *, again: int = 1) -> Run:
        """Publish the request of an incomplete, failed or cancelled run again, as a new run.

        Raises RunOpen, RunNotFound, RunNotRepeatable, and the errors of `publish`. See `tokenbus.Client.retry`.
        """
        return Run(self._loop.call(self._bus.retry(_id(run), again=again)), self)

    def resume(self, run: Run | str, *, again: int = 1) -> Run:
        """Continue from the visible text of the last turn of an incomplete, failed or cancelled run, as a new run.

        Raises the same errors as `retry`. See `tokenbus.Client.resume`.
        """
        return Run(self._loop.call(self._bus.resume(_id(run), again=again)), self)

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
        return self._loop.each(
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
        return self._loop.call(self._bus.describe([_id(run) for run in runs]))

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
        self,
        topic: Literal["decisions"],
        *,
        group: str | None = None,
        from_: Begin = "now",
        **how: Unpack[Reading],
    ) -> Subscription[Decided | UnknownEvent]: ...
    @overload
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        kinds: Classes[K],
        group: str | None = None,
        from_: Begin = "now",
        **how: Unpack[DeliveryOptions],
    ) -> Subscription[K]: ...
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        kinds: Kinds[Any] = None,
        group: str | None = None,
        from_: Begin = "now",
        **how: Unpack[DeliveryOptions],
    ) -> Subscription[Any]:
        """Subscribe to a topic's events of all runs. Enter it with ``with`` and iterate.

        Takes the arguments of `tokenbus.Client.subscribe`. Raises ValueError for invalid ones.
        """
        subscribe: Any = self._bus.subscribe
        return Subscription(self._loop, subscribe(topic, kinds=kinds, group=group, from_=from_, **how))

    def sentences(
        self,
        *,
        group: str | None = None,
        from_: Begin = "now",
        rules: SentenceRules | None = None,
        hold_s: float = HOLD_S,
        **how: Unpack[DeliveryOptions],
    ) -> Subscription[Sentence]:
        """Subscribe to the visible text of all runs as sentences, for speech. Enter it with ``with`` and iterate.

        Takes the arguments of `tokenbus.Client.sentences`. Raises ValueError for invalid ones.
        """
        return Subscription(
            self._loop, self._bus.sentences(group=group, from_=from_, rules=rules, hold_s=hold_s, **how)
        )


def _id(run: Run | str) -> str:
    return run.id if isinstance(run, Run) else run

"""The light client: publish requests, follow runs, subscribe to topics, cancel, take results."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload
from weakref import WeakSet

import msgspec

from tokenbus.bus.keys import DEFAULT_PREFIX, SubscribedTopic
from tokenbus.bus.server.server import Server
from tokenbus.client import publish as publishing
from tokenbus.client.blobs import Blobs
from tokenbus.client.deployment import Deployment, partitions_in, url_in
from tokenbus.client.publish_queue import PublishQueue
from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.client.retry_resume import check_resumable, ended_run, resumed_request, retried_request
from tokenbus.client.run import PUBLISHED_WAIT_S, Run
from tokenbus.client.run_id import new_run_id
from tokenbus.client.run_log import follow
from tokenbus.client.subscriptions.event_filter import Classes, K, Kinds, Runs
from tokenbus.client.subscriptions.factory import (
    Ack,
    Begin,
    Delivery,
    GroupBegin,
    Reading,
    SubscribeOptions,
    Subscription,
    subscription,
)
from tokenbus.client.subscriptions.gaps import OnTrimmed
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.ordered import PREFETCH, OrderedSubscription
from tokenbus.client.subscriptions.sentences import SentenceSubscription
from tokenbus.core.request.parse import MAX_REQUEST_BYTES
from tokenbus.errors import Malformed, RequestInvalid
from tokenbus.events.decisions import Decided
from tokenbus.events.public import (
    BlockTopicEvent,
    ChunkTopicEvent,
    PublicEvent,
    RunTopicEvent,
    UnknownEvent,
)
from tokenbus.events.requests import Cancel, Generate, Message, RunId
from tokenbus.shaping.sentences import SentenceRules

MAX_WAITING = 100_000
"""Most requests on the inbound stream."""
MAX_QUEUED = 1_000
"""Most requests that are on their way from one client, for a `publish` that does not wait."""
HOLD_S = 1.5
"""How long a sentence that is not whole is held."""
IN_HAND = 1_000_000
"""Most chunks of one subscription to sentences that are not acknowledged."""
MORE_FOR_CANCELS = 1_000
"""A full inbound stream still takes this many cancels."""


class Client:
    """A connection to a tokenbus deployment. Belongs to one event loop; use as ``async with Client() as bus``.

    Any number of tasks may use it at once. A thousand `follow` share one connection while they wait for what is new
    (in a Cluster: one for each partition); a subscription has its own. Errors are those of `tokenbus.errors`; a
    server that goes away is waited for by readers, for ``reconnect_s`` seconds, and is an error at once for `publish`
    and `cancel`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        partitions: int | None = None,
        reconnect_s: float = 30.0,
        max_waiting: int = MAX_WAITING,
        max_queued: int = MAX_QUEUED,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        blobs: str | None = None,
        blob_token: str | None = None,
    ) -> None:
        """``url``: ``redis://…``, ``redis+sentinel://…``, ``redis+cluster://…`` or ``unix://…``. None: the variable
        `TOKENBUS_REDIS_URL`, or else the server of the `tokenbus up` that runs in this directory (of its data directory
        `TOKENBUS_DATA`, ``.tokenbus`` by default), if one runs. ``partitions``: None for what the deployment has, or
        else `TOKENBUS_PARTITIONS`. ``max_waiting``: most requests on the inbound stream; ``max_queued``: most that are
        on their way from this client, for a `publish` that does not wait. ``blobs``, ``blob_token``: of the blob
        service, see `Blobs`. Connects to nothing yet. Raises SettingsError.
        """
        env = os.environ
        server = Server(url_in(env) if url is None else url)
        self._deployment = Deployment(server, prefix, partitions_in(env) if partitions is None else partitions)
        self._reconnect_s = reconnect_s
        self._outbound = PublishQueue(server, most_queued=max_queued)
        self._max_waiting = max_waiting
        self._max_request_bytes = max_request_bytes
        self._blob_service = blobs, blob_token
        self._blobs: Blobs | None = None
        self._subscriptions: WeakSet[Subscription] = WeakSet()

    async def __aenter__(self) -> Self:
        """Connect. Raises ServerUnavailable, ServerTooOld, and DeploymentMismatch where ``partitions`` are not the
        deployment's."""
        try:
            await self._deployment.server.check()
            await self._deployment.keys()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all subscriptions and close all connections; runs go on. Iterators still in use raise RuntimeError."""
        try:
            for subscription in list(self._subscriptions):
                await subscription.aclose()
            await self._outbound.close()
        finally:  # cancelled meanwhile, too
            self._subscriptions.clear()
            await self._deployment.aclose()

    @property
    def blobs(self) -> Blobs:
        """The deployment's blob store: ``put``, ``get`` and ``chunks``; also the loader of `sanitize_for_storage`.

        Raises SettingsError for an address or a token that is none.
        """
        if self._blobs is None:
            url, token = self._blob_service
            self._blobs = Blobs(url, token=token)
        return self._blobs

    # --- runs -------------------------------------------------------------------------------------------------

    async def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """Put a request on the bus, with a UUIDv7 as id where it has none. Accepted by the server when this returns.

        Any number of tasks may publish at once: they share a few connections, and wait for each other. ``wait``: False
        to raise PublishQueueFull instead if ``max_queued`` requests of this client are on their way already.

        Raises RequestInvalid and RequestTooLarge, for what no deployment would take; ServerUnavailable and
        ServerFull, after which the same may be published again. Each carries the request with its id as
        ``error.request``: publishing that again is the same run, even if the first try did arrive.
        """
        with publishing.carrying(request):
            run, request = publishing.with_id(request, new_run_id)
        with publishing.carrying(request):
            async with self._outbound.turn(wait=wait):
                data = publishing.encoded(request, limit=self._max_request_bytes)
                tenant = publishing.tenant_in(request)
                stream = (await self._deployment.keys()).requests
                await self._outbound.put(stream, data, tenant=tenant, most=self._max_waiting)
        return Run(run, self)

    async def stream(
        self, request: Generate | Mapping[str, object], *, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> AsyncGenerator[PublicEvent]:
        """Publish a request, when first iterated, and give all its events, the terminal one last.

        However the run ended, the iteration ends normally: look at the last event's type (`Completed`, `Incomplete`,
        `RunFailedEvent`, `Cancelled`), or take `result`, which raises. A caller that stops iterating does not stop
        the run; `cancel` does. Raises as `publish` and `follow`.
        """
        run = await self.publish(request)
        async with aclosing(self.follow(run, wait_s=wait_s)) as events:
            async for event in events:
                yield event

    def follow(
        self, run: Run | str, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> AsyncGenerator[PublicEvent]:
        """All events of a run after the one with seq ``after``, stored and then live: no gap, no double.

        Ends after the terminal event, whatever it is; see `stream`. Goes on over lost connections. Raises

        - RunNotFound where no such run is known for ``wait_s`` seconds (None: waits for ever), or its records expire;
        - CursorTrimmed where the events after ``after`` are gone;
        - CursorAhead if the run has no event with seq ``after``: the cursor is of another run;
        - ValueError if ``after`` is no seq;
        - ServerUnavailable when the server was away for longer than ``reconnect_s``.
        """
        if type(after) is not int or after < -1:
            raise ValueError(f"after: {after!r} is no seq: a whole number from 0, or -1 for all events")
        return follow(self._deployment, _run_id(run), after=after, wait_s=wait_s, reconnect_s=self._reconnect_s)

    async def result(self, run: Run | str, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run's end and fold its events.

        Raises RunFailed, RunIncomplete and RunCancelled, each with what there is as ``error.result``; Malformed where a
        newer version wrote an end that this one does not know; and as `follow`.
        """
        return (await self._ended(run, wait_s)).or_raise()

    async def messages(self, run: Run | str, *, wait_s: float | None = 10.0) -> list[Message]:
        """Wait for the run's end, whatever it is, and give what it said as further ``messages`` of the next request.

        ``[*messages, *await bus.messages(run), {"role": "user", "content": "…"}]`` goes on with the conversation, at
        the same provider or any other: see docs/guides/conversations.md. Raises as `follow`, and Malformed as `result`.
        """
        return (await self._ended(run, wait_s)).messages

    async def _ended(self, run: Run | str, wait_s: float | None) -> Response:
        builder = ResponseBuilder()
        async with aclosing(self.follow(run, wait_s=wait_s)) as events:
            async for event in events:
                builder.add(event)
        response = builder.response
        if response.status == "open":
            raise Malformed(f"run {response.run}", "it ended in a way that this version of tokenbus does not know")
        return response

    async def cancel(self, run: Run | str, reason: str | None = None, *, heard_through: int | None = None) -> None:
        """Ask for the run to be stopped, at the provider too. ``heard_through``: the last seq that a listener heard.

        Returns when the server has the request; the run's `Cancelled` event follows unless it has ended by then.
        Raises RequestInvalid, ServerUnavailable, ServerFull. May be repeated.
        """
        request = Cancel(run=_run_id(run), reason=reason, heard_through=heard_through)
        data = publishing.encoded(request, limit=self._max_request_bytes)
        stream = (await self._deployment.keys()).requests
        await self._outbound.put(stream, data, most=self._max_waiting + MORE_FOR_CANCELS, first=True)

    async def retry(self, run: Run | str, *, again: int = 1) -> Run:
        """Publish the request of a run that ended incomplete, failed or cancelled once more, as a new run.

        Its id follows from the run's, so that a second call gives the same new run; ``again`` counts further ones. Its
        metadata, which `Started` carries, name the old run as ``retry_of``. Raises RunOpen; RunNotFound, also where the
        records have expired; RunNotRepeatable; and as `publish`.
        """
        return await self.publish(retried_request(await ended_run(self._deployment, _run_id(run)), again=again))

    async def resume(self, run: Run | str, *, again: int = 1) -> Run:
        """Go on from the visible text of the last turn of a run that ended incomplete, failed or cancelled, as a new
        run.

        The new run's text is what follows. The partial text is sent as the beginning of the model's answer. Id and
        metadata (``resume_of``) as with `retry`. Raises as that; RunNotRepeatable also where provider and model do not
        go on from a partial answer to this request (see docs/guides/providers.md), where the run said nothing, or
        where it ended among its tool calls.
        """
        ended = await ended_run(self._deployment, _run_id(run))
        check_resumable(ended)
        builder = ResponseBuilder()
        async with aclosing(self.follow(run)) as events:
            async for event in events:
                builder.add(event)
        return await self.publish(resumed_request(ended, builder.response, again=again))

    # --- topics -----------------------------------------------------------------------------------------------

    @overload
    def subscribe(
        self, topic: Literal["visible", "chunks"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[ChunkTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["visible", "chunks"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[ChunkTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[BlockTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[BlockTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[RunTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[RunTopicEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["decisions"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[Decided | UnknownEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["decisions"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[Decided | UnknownEvent]: ...
    @overload
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        group: None = None,
        kinds: Classes[K],
        from_: Begin = "now",
        **how: Unpack[Delivery],
    ) -> OrderedSubscription[K]: ...
    @overload
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        group: str,
        kinds: Classes[K],
        from_: GroupBegin = "now",
        **how: Unpack[Delivery],
    ) -> SharedSubscription[K]: ...
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        group: str | None = None,
        kinds: Kinds[Any] = None,
        runs: Runs | None = None,
        from_: Begin = "now",
        ack: Ack = "auto",
        prefetch: int = PREFETCH,
        on_trimmed: OnTrimmed | None = None,
    ) -> Subscription:
        """The events of a topic, of all runs: enter the subscription with ``async with`` and iterate it, or call
        `each`.

        Without a group every subscription has every event once. With one, the group's workers share them, at least
        once each. Those of one run come in order. Does no IO. Raises ValueError for what cannot be.

        - ``from_``: ``"now"`` for what comes from the first read on; ``"start"`` for all that is kept (for a group:
          when it is new); or a `Cursor` that an `OrderedSubscription` had.
        - ``kinds``: types of events (``block_complete``, ``failed``), kinds of blocks (``text``, ``tool_call``) or
          both: only what is one of the named types, and of a block of one of the named kinds. Or classes of events
          (``BlockComplete``), which a type checker then knows to be all that comes. A subscription reads what
          it leaves out all the same. Events of a type that this version does not know come as `UnknownEvent`, unless
          kinds are named.
        - ``runs``: the ids, or what says of an id whether its run is wanted.
        - ``ack``: how a group's worker says that an event is done, see `SharedSubscription`; without a group, what the
          cursor may pass.
        - ``prefetch``: how many events are held here at once, at least one of each partition.
        - ``on_trimmed``: called with the `CursorTrimmed` of each partition in which unread events were trimmed, once;
          then reading continues at the oldest that is kept. None: iterating raises it, and `each` logs it.
        """
        options = SubscribeOptions(
            kinds=kinds, runs=runs, from_=from_, ack=ack, prefetch=prefetch, on_trimmed=on_trimmed
        )
        return self._subscribe(topic, group, options)

    def sentences(
        self,
        *,
        group: str | None = None,
        runs: Runs | None = None,
        from_: Begin = "now",
        ack: Ack = "auto",
        prefetch: int = PREFETCH,
        rules: SentenceRules | None = None,
        hold_s: float = HOLD_S,
        on_trimmed: OnTrimmed | None = None,
    ) -> SentenceSubscription:
        """The topic `visible` as sentences, for speech: entered, iterated and acknowledged like a `subscribe`.

        ``rules``: the language, the shortest and the longest sentence. ``hold_s``: seconds after which the words of a
        sentence that is not whole are given out. Raises ValueError for what cannot be.
        """
        options = SubscribeOptions(
            runs=runs,
            from_=from_,
            ack="explicit",
            prefetch=prefetch,
            on_trimmed=on_trimmed,
            most_in_hand=IN_HAND,  # of many texts at once a part may be held, which no sentence has acknowledged yet
        )
        chunks = self._subscribe("visible", group, options)
        return SentenceSubscription(
            self._deployment, chunks, rules=rules or SentenceRules(), hold_s=hold_s, ack=ack, prefetch=prefetch
        )

    def _subscribe(self, topic: SubscribedTopic, group: str | None, options: SubscribeOptions) -> Subscription:
        made = subscription(self._deployment, topic, group, options, reconnect_s=self._reconnect_s)
        self._subscriptions.add(made)
        return made


def _run_id(run: Run | str) -> str:
    try:
        return msgspec.convert(run.id if isinstance(run, Run) else run, RunId)
    except msgspec.ValidationError as e:
        raise RequestInvalid("run", str(e)) from None

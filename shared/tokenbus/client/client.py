"""The light client: publish requests, follow runs, subscribe to topics, cancel, take results."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Literal, Self, Unpack, overload
from weakref import WeakSet

import msgspec

from tokenbus.bus.keys import DEFAULT_PREFIX, SubscribedTopic
from tokenbus.bus.server import Server
from tokenbus.client import publishing
from tokenbus.client.again import check_going_on, ended_run, going_on, once_more
from tokenbus.client.deployment import Deployment, partitions_in, url_in
from tokenbus.client.ids import new_run_id
from tokenbus.client.log import follow
from tokenbus.client.ordered import PREFETCH, OrderedSubscription
from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.client.run import PUBLISHED_WAIT_S, Run
from tokenbus.client.selection import Runs, Selection
from tokenbus.client.sentences import SentenceSubscription
from tokenbus.client.shared import SharedSubscription
from tokenbus.client.subscribing import Ack, Begin, GroupBegin, Reading, Subscription, subscription
from tokenbus.core.intake import MAX_REQUEST_BYTES
from tokenbus.errors import Malformed, RequestInvalid
from tokenbus.events.decisions import Decided
from tokenbus.events.public import BlockEvent, Chunk, PublicEvent, RunEvent
from tokenbus.events.requests import Cancel, Generate, RunId
from tokenbus.shaping.sentences import SentenceRules

MAX_WAITING = 100_000
"""Most requests on the inbound stream."""
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
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        """``url`` as `TOKENBUS_REDIS_URL`, which is taken where it is None: ``redis://…``, ``redis+sentinel://…``,
        ``redis+cluster://…`` or ``unix://…``. ``partitions``: None for what the deployment has, or else
        `TOKENBUS_PARTITIONS`. Does no IO. Raises SettingsError.
        """
        env = os.environ
        server = Server(url_in(env) if url is None else url)
        self._deployment = Deployment(server, prefix, partitions_in(env) if partitions is None else partitions)
        self._reconnect_s = reconnect_s
        self._max_waiting = max_waiting
        self._max_request_bytes = max_request_bytes
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
        finally:  # cancelled meanwhile, too
            self._subscriptions.clear()
            await self._deployment.aclose()

    # --- runs -------------------------------------------------------------------------------------------------

    async def publish(self, request: Generate | Mapping[str, object]) -> Run:
        """Put a request on the bus, with a UUIDv7 as id where it has none. Accepted by the server when this returns.

        Raises RequestInvalid and RequestTooLarge, for what no deployment would take; ServerUnavailable and
        ServerFull, after which the same may be published again. Each carries the request with its id as
        ``error.request``: publishing that again is the same run, even if the first try did arrive.
        """
        with publishing.carrying(request):
            run, request = publishing.with_id(request, new_run_id)
        with publishing.carrying(request):
            data = publishing.encoded(request, limit=self._max_request_bytes)
            await self._admit(data, self._max_waiting)
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

    def follow(self, run: Run | str, *, after: int = -1, wait_s: float | None = 10.0) -> AsyncGenerator[PublicEvent]:
        """All events of a run after the one with seq ``after``, stored and then live: no gap, no double.

        Ends after the terminal event, whatever it is; see `stream`. Goes on over lost connections. Raises

        - RunNotFound where no such run is known for ``wait_s`` seconds (None: waits for ever), or its records expire;
        - CursorTrimmed where the events after ``after`` are gone;
        - ServerUnavailable when the server was away for longer than ``reconnect_s``.
        """
        return follow(self._deployment, _run_id(run), after=after, wait_s=wait_s, reconnect_s=self._reconnect_s)

    async def result(self, run: Run | str, *, wait_s: float | None = 10.0) -> Response:
        """Wait for the run's end and fold its events.

        Raises RunFailed, RunIncomplete and RunCancelled, each with what there is as ``error.result``; Malformed where a
        newer version wrote an end that this one does not know; and as `follow`.
        """
        builder = ResponseBuilder()
        async with aclosing(self.follow(run, wait_s=wait_s)) as events:
            async for event in events:
                builder.add(event)
        response = builder.response
        if response.status == "open":
            raise Malformed(f"run {response.run}", "it ended in a way that this version of tokenbus does not know")
        return response.or_raise()

    async def cancel(self, run: Run | str, reason: str | None = None, *, heard_through: int | None = None) -> None:
        """Ask for the run to be stopped, at the provider too. ``heard_through``: the last seq that a listener heard.

        Returns when the server has the request; the run's `Cancelled` event follows unless it has ended by then.
        Raises RequestInvalid, ServerUnavailable, ServerFull. May be repeated.
        """
        request = Cancel(run=_run_id(run), reason=reason, heard_through=heard_through)
        data = publishing.encoded(request, limit=self._max_request_bytes)
        await self._admit(data, self._max_waiting + MORE_FOR_CANCELS)

    async def retry(self, run: Run | str, *, again: int = 1) -> Run:
        """Publish the request of a run that ended incomplete, failed or cancelled once more, as a new run.

        Its id follows from the run's, so that a second call gives the same new run; ``again`` counts further ones. Its
        metadata, which `Started` carries, name the old run as ``retry_of``. Raises RunOpen; RunNotFound, also where the
        records have expired; RunNotRepeatable; and as `publish`.
        """
        return await self.publish(once_more(await ended_run(self._deployment, _run_id(run)), again=again))

    async def resume(self, run: Run | str, *, again: int = 1) -> Run:
        """Go on from the visible text of the last turn of a run that ended incomplete, failed or cancelled, as a new
        run.

        The new run's text is what follows. The partial text is sent as the beginning of the model's answer. Id and
        metadata (``resume_of``) as with `retry`. Raises as that; RunNotRepeatable also where provider and model do not
        go on from a partial answer to this request (docs/providers.md says which do), where the run said nothing, or
        where it ended among its tool calls.
        """
        ended = await ended_run(self._deployment, _run_id(run))
        check_going_on(ended)
        builder = ResponseBuilder()
        async with aclosing(self.follow(run)) as events:
            async for event in events:
                builder.add(event)
        return await self.publish(going_on(ended, builder.response, again=again))

    async def _admit(self, data: bytes, most: int) -> None:
        keys = await self._deployment.keys()
        await publishing.admit(self._deployment.server, keys.requests, data, most=most)

    # --- topics -----------------------------------------------------------------------------------------------

    @overload
    def subscribe(
        self, topic: Literal["visible", "chunks"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[Chunk]: ...
    @overload
    def subscribe(
        self, topic: Literal["visible", "chunks"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[Chunk]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[BlockEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[BlockEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[RunEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[RunEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["decisions"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[Decided]: ...
    @overload
    def subscribe(
        self, topic: Literal["decisions"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[Decided]: ...
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        group: str | None = None,
        kinds: Collection[str] | None = None,
        runs: Runs | None = None,
        from_: Begin = "now",
        ack: Ack = "auto",
        prefetch: int = PREFETCH,
    ) -> Subscription:
        """The events of a topic, of all runs: enter the subscription with ``async with`` and iterate it, or call
        `each`.

        Without a group every subscription has every event once. With one, the group's workers share them, at least
        once each. Those of one run come in order. Does no IO. Raises ValueError for what cannot be.

        - ``from_``: ``"now"`` for what comes from the first read on; ``"start"`` for all that is kept (for a group:
          when it is new); or a `Cursor` that an `OrderedSubscription` had.
        - ``kinds``: types of events (``block_complete``, ``failed``), kinds of blocks (``text``, ``tool_call``) or
          both: only what is one of the named types, and of a block of one of the named kinds. A subscription reads what
          it leaves out all the same. Events of a type that this version does not know come as `UnknownEvent`, unless
          kinds are named. Decisions have no kinds.
        - ``runs``: the ids, or what says of an id whether its run is wanted.
        - ``ack``: how a group's worker says that an event is done, see `SharedSubscription`; without a group, what the
          cursor may pass.
        - ``prefetch``: how many events are held here at once, at least one of each partition.
        """
        return self._subscribe(topic, group, selection=Selection(kinds, runs), from_=from_, ack=ack, prefetch=prefetch)

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
    ) -> SentenceSubscription:
        """The topic `visible` as sentences, for speech: entered, iterated and acknowledged like a `subscribe`.

        ``rules``: the language, the shortest and the longest sentence. ``hold_s``: seconds after which the words of a
        sentence that is not whole are given out. Raises ValueError for what cannot be.
        """
        chunks = self._subscribe(
            "visible",
            group,
            selection=Selection(runs=runs),
            from_=from_,
            ack="explicit",
            prefetch=prefetch,
            most_in_hand=IN_HAND,  # of many texts at once a part may be held, which no sentence has acknowledged yet
        )
        return SentenceSubscription(
            self._deployment, chunks, rules=rules or SentenceRules(), hold_s=hold_s, ack=ack, prefetch=prefetch
        )

    def _subscribe(
        self,
        topic: SubscribedTopic,
        group: str | None,
        *,
        selection: Selection,
        from_: Begin,
        ack: Ack,
        prefetch: int,
        most_in_hand: int | None = None,
    ) -> Subscription:
        made = subscription(
            self._deployment,
            topic,
            group,
            selection=selection,
            from_=from_,
            ack=ack,
            prefetch=prefetch,
            most_in_hand=most_in_hand,
            reconnect_s=self._reconnect_s,
        )
        self._subscriptions.add(made)
        return made


def _run_id(run: Run | str) -> str:
    try:
        return msgspec.convert(run.id if isinstance(run, Run) else run, RunId)
    except msgspec.ValidationError as e:
        raise RequestInvalid("run", str(e)) from None

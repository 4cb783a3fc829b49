"""The light client: publish requests, follow runs, subscribe to topics, cancel, take results."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self, overload
from weakref import WeakSet

import msgspec

from tokenbus.bus.keys import DEFAULT_PREFIX, PublicTopic
from tokenbus.bus.server import Server
from tokenbus.client import publishing
from tokenbus.client.cursor import Cursor
from tokenbus.client.deployment import Deployment, partitions_in, url_in
from tokenbus.client.ids import new_run_id
from tokenbus.client.log import follow
from tokenbus.client.ordered import OrderedSubscription
from tokenbus.client.result import Result, ResultBuilder
from tokenbus.client.run import PUBLISHED_WAIT_S, Run
from tokenbus.client.shared import SharedSubscription
from tokenbus.core.intake import MAX_REQUEST_BYTES
from tokenbus.errors import RequestInvalid
from tokenbus.events.public import BlockEvent, Chunk, PublicEvent, RunEvent
from tokenbus.events.requests import Cancel, Generate, RunId

MAX_WAITING = 100_000
"""Most requests on the inbound stream."""
MORE_FOR_CANCELS = 1_000
"""A full inbound stream still takes this many cancels."""


class Client:
    """A connection to a tokenbus deployment. Belongs to one event loop; use as ``async with Client() as bus``.

    Any number of tasks may use it at once. Every blocking reader (a `follow`, a subscription) holds one connection
    while it waits. Errors are those of `tokenbus.errors`; a server that goes away is waited for by readers, for
    ``reconnect_s`` seconds, and is an error at once for `publish` and `cancel`.
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
        self._subscriptions: WeakSet[OrderedSubscription[Any] | SharedSubscription[Any]] = WeakSet()

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
        for subscription in list(self._subscriptions):
            await subscription.aclose()
        self._subscriptions.clear()
        self._deployment.closed = True
        await self._deployment.server.aclose()

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

    async def result(self, run: Run | str, *, wait_s: float | None = 10.0) -> Result:
        """Wait for the run's end and fold its events.

        Raises RunFailed, RunIncomplete and RunCancelled, each with what there is as ``error.result``; and as `follow`.
        """
        builder = ResultBuilder()
        async with aclosing(self.follow(run, wait_s=wait_s)) as events:
            async for event in events:
                if result := builder.add(event):
                    return result.or_raise()
        raise AssertionError("the events of a run end with the terminal one")

    async def cancel(self, run: Run | str, reason: str | None = None, *, heard_through: int | None = None) -> None:
        """Ask for the run to be stopped, at the provider too. ``heard_through``: the last seq that a listener heard.

        Returns when the server has the request; the run's `Cancelled` event follows unless it has ended by then.
        Raises RequestInvalid, ServerUnavailable, ServerFull. May be repeated.
        """
        request = Cancel(run=_run_id(run), reason=reason, heard_through=heard_through)
        data = publishing.encoded(request, limit=self._max_request_bytes)
        await self._admit(data, self._max_waiting + MORE_FOR_CANCELS)

    async def _admit(self, data: bytes, most: int) -> None:
        keys = await self._deployment.keys()
        await publishing.admit(self._deployment.server, keys.requests, data, most=most)

    # --- topics -----------------------------------------------------------------------------------------------

    @overload
    def subscribe(
        self,
        topic: Literal["visible", "chunks"],
        *,
        group: None = None,
        after: Cursor | Literal["oldest"] | None = None,
    ) -> OrderedSubscription[Chunk]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: None = None, after: Cursor | Literal["oldest"] | None = None
    ) -> OrderedSubscription[BlockEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: None = None, after: Cursor | Literal["oldest"] | None = None
    ) -> OrderedSubscription[RunEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["visible", "chunks"], *, group: str, after: Literal["oldest"] | None = None
    ) -> SharedSubscription[Chunk]: ...
    @overload
    def subscribe(
        self, topic: Literal["blocks"], *, group: str, after: Literal["oldest"] | None = None
    ) -> SharedSubscription[BlockEvent]: ...
    @overload
    def subscribe(
        self, topic: Literal["runs"], *, group: str, after: Literal["oldest"] | None = None
    ) -> SharedSubscription[RunEvent]: ...
    def subscribe(
        self, topic: PublicTopic, *, group: str | None = None, after: Cursor | Literal["oldest"] | None = None
    ) -> OrderedSubscription[Any] | SharedSubscription[Any]:
        """The events of a topic, of all runs: enter the subscription with ``async with``, and iterate it.

        Without a group every subscription has every event once. With one, the group's workers share them, at least
        once each. Those of one run come in order. ``after``: None for what comes from now on; a `Cursor` that an
        `OrderedSubscription` had; ``"oldest"`` for all that is kept (for a group: when it is new). Does no IO.
        Raises ValueError for a group or an ``after`` that cannot be.
        """
        if isinstance(after, Cursor) and (group is not None or after.topic != topic):
            raise ValueError(f"after: a cursor of {after.topic}; a group keeps its own, another topic has another")
        if group is None:
            made: OrderedSubscription[Any] | SharedSubscription[Any] = OrderedSubscription(
                self._deployment, topic, after=after, reconnect_s=self._reconnect_s
            )
        else:
            begin: Literal["oldest"] | None = "oldest" if after == "oldest" else None
            made = SharedSubscription(self._deployment, topic, group=group, after=begin, reconnect_s=self._reconnect_s)
        self._subscriptions.add(made)
        return made


def _run_id(run: Run | str) -> str:
    try:
        return msgspec.convert(run.id if isinstance(run, Run) else run, RunId)
    except msgspec.ValidationError as e:
        raise RequestInvalid("run", str(e)) from None

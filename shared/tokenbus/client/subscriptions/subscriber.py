"""Subscribing to a deployment's topics: the events of all runs, or their visible text as sentences."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args, overload
from weakref import WeakSet

import msgspec

from tokenbus.bus.keys import TOPICS, SubscribedTopic
from tokenbus.client.deployment import Deployment
from tokenbus.client.subscriptions.cursor import Cursor, OnTrimmed
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.ordered import PREFETCH, OrderedSubscription
from tokenbus.client.subscriptions.sentences import SentenceSubscription
from tokenbus.client.subscriptions.topic_reader import Classes, K, Kind, Kinds, Runs, Selection
from tokenbus.core.nearest_name import unknown_name
from tokenbus.events.decisions import Decided
from tokenbus.events.public import BlockTopicEvent, ChunkTopicEvent, RunTopicEvent, UnknownEvent
from tokenbus.events.sessions import SessionTopicEvent
from tokenbus.shaping.sentences import SentenceRules

HOLD_S = 1.5
"""How long an incomplete sentence is held back."""
MAX_UNACKNOWLEDGED = 1_000_000
"""Maximum unacknowledged chunks of one sentence subscription."""


class TopicSubscriber:
    """The part of a client that subscribes. Does no IO of its own; owns the subscriptions until they are closed."""

    def __init__(self, deployment: Deployment, *, reconnect_s: float) -> None:
        self._deployment = deployment
        self._reconnect_s = reconnect_s
        self._subscriptions: WeakSet[Subscription] = WeakSet()

    async def _close_subscriptions(self) -> None:
        try:
            for one in list(self._subscriptions):
                await one.aclose()
        finally:  # also if this is cancelled
            self._subscriptions.clear()

    @overload
    def subscribe(
        self,
        topic: Literal["visible", "chunks"],
        *,
        group: None = None,
        from_: Begin = "now",
        **how: Unpack[Reading],
    ) -> OrderedSubscription[ChunkTopicEvent]: ...

    @overload
    def subscribe(
        self,
        topic: Literal["visible", "chunks"],
        *,
        group: str,
        from_: GroupBegin = "now",
        **how: Unpack[Reading],
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
        self, topic: Literal["sessions"], *, group: None = None, from_: Begin = "now", **how: Unpack[Reading]
    ) -> OrderedSubscription[SessionTopicEvent]: ...

    @overload
    def subscribe(
        self, topic: Literal["sessions"], *, group: str, from_: GroupBegin = "now", **how: Unpack[Reading]
    ) -> SharedSubscription[SessionTopicEvent]: ...

    @overload
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        group: None = None,
        kinds: Classes[K],
        from_: Begin = "now",
        **how: Unpack[DeliveryOptions],
    ) -> OrderedSubscription[K]: ...

    @overload
    def subscribe(
        self,
        topic: SubscribedTopic,
        *,
        group: str,
        kinds: Classes[K],
        from_: GroupBegin = "now",
        **how: Unpack[DeliveryOptions],
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
        """Subscribe to a topic's events of all runs. Enter it with ``async with`` and iterate, or call `each`.

        Without a group, every subscription gets every event once. With a group, its workers share the events, each
        delivered at least once. Events of one run arrive in order, and on `sessions` those of one session. Does no IO.
        Raises ValueError for invalid arguments.

        - ``from_``: ``"now"`` for events after the first read; ``"start"`` for everything that is kept (for a group:
          only when the group is new); or a `Cursor` of an `OrderedSubscription`.
        - ``kinds``: event types (``block_complete``, ``failed``), block kinds (``text``, ``tool_call``) or both. An
          event must have one of the named types and, if it belongs to a block, one of the named block kinds. Or event
          classes (``BlockComplete``), which also narrow the type for a type checker. Filtered events are still read.
          Events of types unknown to this version come as `UnknownEvent`, unless kinds are named.
        - ``runs``: run ids, or a predicate on run ids; of `sessions`, only events that concern such a run.
        - ``ack``: how a group's worker acknowledges events, see `SharedSubscription`; without a group, when the cursor
          advances.
        - ``prefetch``: maximum events held here, at least one per partition.
        - ``on_trimmed``: called once with the `CursorTrimmed` of each partition in which unread events were trimmed;
          reading then continues at the oldest entry that is kept. None: iterating raises it, and `each` logs it.
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
        """Subscribe to the topic `visible` as sentences, for speech. Enter, iterate and acknowledge like a `subscribe`.

        ``rules``: language, shortest and longest sentence. ``hold_s``: seconds after which an incomplete sentence is
        delivered. Raises ValueError for invalid arguments.
        """
        options = SubscribeOptions(
            runs=runs,
            from_=from_,
            ack="explicit",
            prefetch=prefetch,
            on_trimmed=on_trimmed,
            max_unacknowledged=MAX_UNACKNOWLEDGED,  # held text of many blocks at once is not yet acknowledged
        )
        chunks = self._subscribe("visible", group, options)
        return SentenceSubscription(
            self._deployment, chunks, rules=rules or SentenceRules(), hold_s=hold_s, ack=ack, prefetch=prefetch
        )

    def _subscribe(self, topic: SubscribedTopic, group: str | None, options: SubscribeOptions) -> Subscription:
        made = subscription(self._deployment, topic, group, options, reconnect_s=self._reconnect_s)
        self._subscriptions.add(made)
        return made


Ack: TypeAlias = Literal["auto", "explicit"]
GroupBegin: TypeAlias = Literal["now", "start"]
Begin: TypeAlias = Cursor | GroupBegin
Subscription: TypeAlias = OrderedSubscription[Any] | SharedSubscription[Any]


class DeliveryOptions(TypedDict, total=False):
    """Options common to all subscriptions; see `tokenbus.Client.subscribe`."""

    runs: Runs | None
    ack: Ack
    prefetch: int
    on_trimmed: OnTrimmed | None


class Reading(DeliveryOptions, total=False):
    """Adds the filter on event kinds."""

    kinds: Kind | Collection[Kind] | None


class SubscribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a subscription starts, filters and acknowledges; see `tokenbus.Client.subscribe`."""

    kinds: Kinds[Any] = None
    runs: Runs | None
    from_: Begin
    ack: Ack
    prefetch: int
    on_trimmed: OnTrimmed | None
    max_unacknowledged: int | None = None
    """Maximum unacknowledged events of a group's worker; None: same as ``prefetch``."""


def subscription(
    deployment: Deployment,
    topic: SubscribedTopic,
    group: str | None,
    options: SubscribeOptions,
    *,
    reconnect_s: float,
) -> Subscription:
    """Create a subscription that has not started; a shared one if there is a group. Raises ValueError for invalid
    arguments.
    """
    if topic not in TOPICS:
        raise ValueError(f"topic: {unknown_name(topic, TOPICS)}")
    selection = Selection(topic, options.kinds, options.runs)
    if options.prefetch < 1:
        raise ValueError("prefetch: at least 1")
    if options.ack not in get_args(Ack):
        raise ValueError(f"ack: {unknown_name(options.ack, get_args(Ack))}")
    from_ = options.from_
    if isinstance(from_, Cursor):
        if group is not None or from_.topic != topic:
            raise ValueError(f"from_: a cursor of {from_.topic}; a group keeps its own, another topic has another")
        from_.check()
    elif from_ not in ("now", "start"):
        raise ValueError(f"from_: {unknown_name(from_, ('now', 'start'))}, or a Cursor")
    if group is None:
        return OrderedSubscription(
            deployment,
            topic,
            begin=from_,
            selection=selection,
            ack=options.ack,
            prefetch=options.prefetch,
            reconnect_s=reconnect_s,
            on_trimmed=options.on_trimmed,
        )
    return SharedSubscription(
        deployment,
        topic,
        group=group,
        begin="start" if from_ == "start" else "now",
        selection=selection,
        ack=options.ack,
        prefetch=options.prefetch,
        max_unacknowledged=options.max_unacknowledged,
        reconnect_s=reconnect_s,
        on_trimmed=options.on_trimmed,
    )

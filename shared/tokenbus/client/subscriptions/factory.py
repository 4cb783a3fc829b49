"""The options of a subscription, and the factory that picks its class."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import msgspec

from tokenbus.bus.keys import TOPICS, SubscribedTopic
from tokenbus.client.deployment import Deployment
from tokenbus.client.subscriptions.cursor import Cursor
from tokenbus.client.subscriptions.event_filter import Kind, Kinds, Runs, Selection
from tokenbus.client.subscriptions.gaps import OnTrimmed
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.ordered import OrderedSubscription
from tokenbus.core.nearest_name import unknown_name

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

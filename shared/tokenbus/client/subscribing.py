"""What a subscription takes, and which kind of one that makes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeAlias, TypedDict

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.client.cursor import Cursor
from tokenbus.client.deployment import Deployment
from tokenbus.client.ordered import OrderedSubscription
from tokenbus.client.selection import Runs, Selection
from tokenbus.client.shared import SharedSubscription

Ack: TypeAlias = Literal["auto", "explicit"]
GroupBegin: TypeAlias = Literal["now", "start"]
Begin: TypeAlias = Cursor | GroupBegin
Subscription: TypeAlias = OrderedSubscription[Any] | SharedSubscription[Any]


class Reading(TypedDict, total=False):
    """What may be said of any subscription to a topic; see `tokenbus.Client.subscribe`."""

    kinds: Collection[str] | None
    runs: Runs | None
    ack: Ack
    prefetch: int


def subscription(
    deployment: Deployment,
    topic: SubscribedTopic,
    group: str | None,
    *,
    selection: Selection,
    from_: Begin,
    ack: Ack,
    prefetch: int,
    reconnect_s: float,
    most_in_hand: int | None = None,
) -> Subscription:
    """A subscription that has not begun: with a group a shared one. Raises ValueError for what cannot be."""
    selection = selection.of(topic)
    if prefetch < 1:
        raise ValueError("prefetch: at least 1")
    if isinstance(from_, Cursor):
        if group is not None or from_.topic != topic:
            raise ValueError(f"from_: a cursor of {from_.topic}; a group keeps its own, another topic has another")
    elif from_ not in ("now", "start"):
        raise ValueError(f'from_: {from_!r} is neither "now", "start" nor a Cursor')
    if group is None:
        return OrderedSubscription(
            deployment,
            topic,
            begin=from_,
            selection=selection,
            ack=ack,
            prefetch=prefetch,
            reconnect_s=reconnect_s,
        )
    return SharedSubscription(
        deployment,
        topic,
        group=group,
        begin="start" if from_ == "start" else "now",
        selection=selection,
        ack=ack,
        prefetch=prefetch,
        most_in_hand=most_in_hand,
        reconnect_s=reconnect_s,
    )

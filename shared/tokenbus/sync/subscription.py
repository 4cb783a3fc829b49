"""A subscription to a topic or to sentences, from a synchronous client."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from tokenbus.client.decode import TopicEvent
from tokenbus.client.subscriptions.block_sentences import Sentence
from tokenbus.client.subscriptions.cursor import Cursor
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.ordered import OrderedSubscription
from tokenbus.client.subscriptions.sentences import SentenceSubscription
from tokenbus.sync.loop_thread import LoopThread

E = TypeVar("E", bound=TopicEvent | Sentence)


class Subscription(Generic[E]):
    """The events of a topic, or sentences. Enter it with ``with`` and iterate over it."""

    def __init__(
        self, loop: LoopThread, events: OrderedSubscription[Any] | SharedSubscription[Any] | SentenceSubscription
    ) -> None:
        self._loop = loop
        self._events: Any = events

    @property
    def cursor(self) -> Cursor:
        """The position from which another subscription can continue; see `tokenbus.OrderedSubscription.cursor`.

        Raises RuntimeError if the subscription has not started.
        """
        return self._events.cursor

    def __enter__(self) -> Self:
        self._loop.call(self._events.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call(self._events.__aexit__(kind, error, trace))

    def close(self) -> None:
        """End the subscription: iteration ends and the connection is released."""
        self._loop.call(self._events.aclose())

    def ack(self, event: E) -> None:
        """Mark the event as done (``ack="explicit"``). Does nothing if it is not in flight."""
        self._loop.call(_called(self._events.ack, event))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> E:
        try:
            return self._loop.call(self._events.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


async def _called(function: Callable[[E], None], value: E) -> None:
    function(value)

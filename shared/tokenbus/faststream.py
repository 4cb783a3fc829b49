"""A FastStream service subscribes to the bus with one decorator, and its handlers get typed events.

    from faststream import FastStream
    from faststream.redis import RedisBroker
    from tokenbus import Chunk
    from tokenbus.faststream import BusRouter

    broker = RedisBroker("redis://localhost:6379")
    bus = BusRouter(broker, "redis://localhost:6379")

    @bus.subscriber("visible", group="tts")
    async def speak(chunk: Chunk) -> None: ...

    app = FastStream(broker)

What FastStream does around a message stays: dependencies, context, middlewares, lifespan, AsyncAPI page. The read is
the client's: FastStream's own takes one stream a subscriber with competing consumers, which keeps no order of a run
(see `tokenbus.SharedSubscription` for what a group does here). Needs `faststream[redis]`, which nothing else of
`tokenbus` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.middlewares import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.message import FAKE_CONSUMER, RedisStreamMessage
from faststream.redis.subscriber.config import RedisSubscriberConfig, RedisSubscriberSpecificationConfig
from faststream.redis.subscriber.specification import StreamSubscriberSpecification
from faststream.redis.subscriber.usecases import StreamSubscriber
from faststream.redis.subscriber.usecases.basic import LogicSubscriber

from tokenbus.bus.keys import DEFAULT_PREFIX, SubscribedTopic
from tokenbus.client.client import Client
from tokenbus.client.cursor import Cursor
from tokenbus.client.ordered import PREFETCH
from tokenbus.client.selection import Runs
from tokenbus.errors import TokenbusError
from tokenbus.events.public import UnknownEvent
from tokenbus.shaping.sentences import SentenceRules

if TYPE_CHECKING:
    from anyio import Event
    from faststream.redis.configs import RedisBrokerConfig

__all__ = ["BusRouter"]

F = TypeVar("F", bound=Callable[..., Any])
Topic = SubscribedTopic | Literal["sentences"]
Subscribe = Callable[[Client, Cursor | None], Any]
"""Begins a subscription, at the cursor where an earlier one got to."""

PAUSE_S = 0.5
"""Before a subscription that ended in an error begins anew."""


class BusRouter:
    """Puts subscribers to the bus on a `RedisBroker`, which starts and stops them with its own."""

    def __init__(
        self,
        broker: RedisBroker,
        url: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        partitions: int | None = None,
    ) -> None:
        """``url``, ``prefix`` and ``partitions`` as `tokenbus.Client` takes them. Does no IO. Raises SettingsError."""
        self._broker = broker
        self._prefix = prefix
        self._how: dict[str, Any] = {"url": url, "prefix": prefix, "partitions": partitions}
        Client(**self._how)

    def subscriber(
        self,
        topic: Topic,
        *,
        group: str | None = None,
        kinds: Collection[str] | None = None,
        runs: Runs | None = None,
        from_: Cursor | Literal["now", "start"] = "now",
        concurrency: int = 1,
        prefetch: int = PREFETCH,
        rules: SentenceRules | None = None,
        on_error: Literal["skip", "again"] = "skip",
        title: str | None = None,
        description: str | None = None,
    ) -> Callable[[F], F]:
        """Decorates a handler of this topic's events: of ``concurrency`` runs at once, of one run one after the other.

        The handler's first parameter is the event: `Chunk` of ``visible`` and ``chunks``, `BlockStarted` or
        `BlockComplete` of ``blocks``, the events of `runs`, `Decided` of ``decisions``, `Sentence` of ``sentences``
        (``rules`` are for those, ``kinds`` for the first four). Events of a type that this version does not know are
        passed over.

        Without a group each process has every event once. With one, its processes share the runs; an event whose
        handler was not done comes again. An error of a handler is FastStream's to log; then the event counts as done,
        or with ``on_error="again"`` all handlers stop and the group goes on before it after a pause. A subscription
        that ends in an error of the bus (`CursorTrimmed`, say) is logged and begins anew. Raises ValueError as
        `Client.subscribe`.
        """

        def subscription(client: Client, cursor: Cursor | None) -> Any:
            where: dict[str, Any] = {"group": group, "runs": runs, "from_": cursor or from_, "prefetch": prefetch}
            if topic == "sentences":
                return client.sentences(rules=rules, **where)
            subscribe: Any = client.subscribe
            return subscribe(topic, kinds=kinds, **where)

        subscription(Client(**self._how), None)  # an argument that cannot be is told where it stands
        subscriber = _Subscriber(
            self._broker,
            f"{self._prefix}:{topic}",
            title,
            description,
            client=lambda: Client(**self._how),
            subscribe=subscription,
            concurrency=concurrency,
            again=on_error == "again",
            shared=group is not None,
        )
        register = cast("Any", Registrator).subscriber  # RedisBroker's own makes the subscriber itself
        register(self._broker, subscriber)
        subscriber.add_call(parser_=_parse, decoder_=_decode, dependencies_=())
        return cast("Callable[[F], F]", subscriber)


class _Subscriber(StreamSubscriber):
    """A FastStream subscriber that a subscription of the client feeds."""

    def __init__(
        self,
        broker: RedisBroker,
        stream: str,
        title: str | None,
        description: str | None,
        *,
        client: Callable[[], Client],
        subscribe: Subscribe,
        concurrency: int,
        again: bool,
        shared: bool,
    ) -> None:
        outer = cast("RedisBrokerConfig", broker.config)
        source = StreamSub(stream)
        config = RedisSubscriberConfig(
            stream_sub=source, no_reply=True, _outer_config=outer, _ack_policy=AckPolicy.MANUAL
        )
        about = RedisSubscriberSpecificationConfig(title_=title, description_=description)
        calls = CallsCollection[Any]()
        super().__init__(config, StreamSubscriberSpecification(outer, about, calls, source), calls)
        self._open = client
        self._subscribe = subscribe
        self._concurrency = concurrency
        self._again = again
        self._shared = shared
        self._subscription: Any = None

    async def start(self) -> None:
        await LogicSubscriber.start(self)

    async def stop(self) -> None:
        self.running = False
        if self._subscription:
            await self._subscription.aclose()  # handlers that run may end; what they were at comes again in a group
        await super().stop()

    async def _consume(self, *args: Any, start_signal: Event) -> None:
        start_signal.set()
        cursor: Cursor | None = None
        while self.running:
            try:
                async with self._open() as client:
                    self._subscription = self._subscribe(client, cursor)
                    async with self._subscription:
                        try:
                            await self._subscription.each(self._handle, concurrency=self._concurrency)
                        finally:
                            cursor = None if self._shared else self._subscription.cursor
            except _HandlerError:
                pass
            except TokenbusError as e:
                self._log(logging.ERROR, f"Subscription ended: {e}", exc_info=e)
            if self.running:
                await asyncio.sleep(PAUSE_S)

    async def _handle(self, event: object) -> None:
        if isinstance(event, UnknownEvent):
            return  # no handler has a parameter of its type
        message: dict[str, Any] = {
            "type": "stream",
            "channel": self.stream_sub.name,
            "message_ids": [],
            "data": {},
            "event": event,
        }
        if not self._again:
            await self.consume(cast("Any", message))
            return
        try:
            await self.process_message(cast("Any", message))
        except Exception as e:
            raise _HandlerError from e


class _HandlerError(Exception):
    """A handler raised; FastStream has logged what."""


async def _parse(message: Any) -> RedisStreamMessage:
    return RedisStreamMessage(raw_message=message, body=b"", consumer=FAKE_CONSUMER, group=None)


async def _decode(message: RedisStreamMessage) -> Any:
    return cast("dict[str, Any]", message.raw_message)["event"]

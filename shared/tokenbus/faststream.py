"""Subscribes a FastStream service to the bus with one decorator; its handlers get typed events.

    from faststream import FastStream
    from faststream.redis import RedisBroker
    from tokenbus import Chunk
    from tokenbus.faststream import BusRouter

    broker = RedisBroker("redis://localhost:6379")
    bus = BusRouter(broker, "redis://localhost:6379")

    @bus.subscriber("visible", group="tts")
    async def speak(chunk: Chunk) -> None: ...

    app = FastStream(broker)

FastStream's own features work as usual: dependencies, context, middlewares, lifespan, AsyncAPI page. Entries are read
by the tokenbus client, because FastStream's reader uses competing consumers on one stream, which does not keep a run's
events in order (see `tokenbus.SharedSubscription` for groups). Needs `faststream[redis]`; the rest of `tokenbus` does
not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec
from faststream.middlewares import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.message import FAKE_CONSUMER, RedisStreamMessage, bDATA_KEY
from faststream.redis.parser import BinaryMessageFormatV1
from faststream.redis.subscriber.config import RedisSubscriberConfig, RedisSubscriberSpecificationConfig
from faststream.redis.subscriber.specification import StreamSubscriberSpecification
from faststream.redis.subscriber.usecases.basic import LogicSubscriber

from tokenbus.bus.keys import DEFAULT_PREFIX, SubscribedTopic
from tokenbus.client.client import Client
from tokenbus.client.decode import order_of, topic_event
from tokenbus.client.subscriptions.cursor import Cursor
from tokenbus.client.subscriptions.ordered import PREFETCH
from tokenbus.client.subscriptions.sentences import Sentence
from tokenbus.client.subscriptions.topic_reader import Kinds, Runs
from tokenbus.core.nearest_name import unknown_name
from tokenbus.errors import TokenbusError
from tokenbus.events.topics import UNKNOWN
from tokenbus.faststream_internals import CallsCollection, EventSubscriber, MessageId, Registrator
from tokenbus.shaping.sentences import SentenceRules

if TYPE_CHECKING:
    from anyio import Event
    from faststream.redis.configs import RedisBrokerConfig

__all__ = ["BusRouter"]

F = TypeVar("F", bound=Callable[..., Any])
Topic = SubscribedTopic | Literal["sentences"]
Subscribe = Callable[[Client, Cursor | None], Any]
"""Starts a subscription, at the cursor where an earlier one stopped."""

PAUSE_S = 0.5
"""Pause before a failed subscription is restarted."""


class BusRouter:
    """Adds bus subscribers to a `RedisBroker`, which starts and stops them like its own."""

    def __init__(
        self,
        broker: RedisBroker,
        url: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        partitions: int | None = None,
    ) -> None:
        """``url``, ``prefix`` and ``partitions`` are as in `tokenbus.Client`. Does no IO. Raises SettingsError."""
        self._broker = broker
        self._prefix = prefix
        self._how: dict[str, Any] = {"url": url, "prefix": prefix, "partitions": partitions}
        Client(**self._how)

    def subscriber(
        self,
        topic: Topic,
        *,
        group: str | None = None,
        kinds: Kinds[Any] = None,
        runs: Runs | None = None,
        from_: Cursor | Literal["now", "start"] = "now",
        concurrency: int = 1,
        prefetch: int = PREFETCH,
        rules: SentenceRules | None = None,
        on_error: Literal["skip", "again"] = "skip",
        tries: int = 5,
        title: str | None = None,
        description: str | None = None,
    ) -> Callable[[F], F]:
        """Decorate a handler for this topic's events. Handles ``concurrency`` runs at once, each run's events in order.

        The handler's first parameter is the event: `Chunk` for ``visible`` and ``chunks``, `BlockStarted` or
        `BlockComplete` for ``blocks``, run events for ``runs``, `Decided` for ``decisions``, `SessionTopicEvent` for
        ``sessions``, `Sentence` for ``sentences`` (``rules`` applies only to those, ``kinds`` to all others). Events of
        a type unknown to this version are skipped.

        Without a group, every process gets every event once. With a group, its processes share the runs, and an event
        whose handler did not finish is delivered again. FastStream logs a handler's error; then the event counts as
        done. With ``on_error="again"``, which needs a group, the event is handled again after a pause, and becomes a
        dead letter when it has failed ``tries`` times in all processes together: see `SharedSubscription.each`. Events
        that were trimmed before they were read are logged. A subscription that ends in another bus error is logged and
        restarted.

        FastStream's logs name an event's run and seq. In a test with `TestRedisBroker`, publish an event as JSON
        to the stream ``<prefix>:<topic>``. Raises ValueError like `Client.subscribe`.
        """
        if on_error not in ("skip", "again"):
            raise ValueError(f"on_error: {unknown_name(on_error, ('skip', 'again'))}")
        if tries < 1:
            raise ValueError("tries: must be at least 1")
        if on_error == "again" and group is None:
            raise ValueError("on_error: 'again' needs a group, which counts the tries")

        def subscription(client: Client, cursor: Cursor | None) -> Any:
            where: dict[str, Any] = {"group": group, "runs": runs, "from_": cursor or from_, "prefetch": prefetch}
            if topic == "sentences":
                return client.sentences(rules=rules, **where)
            subscribe: Any = client.subscribe
            return subscribe(topic, kinds=kinds, **where)

        subscription(Client(**self._how), None)  # report invalid arguments here rather than in the background task
        subscriber = _Subscriber(
            self._broker,
            f"{self._prefix}:{topic}",
            title,
            description,
            client=lambda: Client(**self._how),
            subscribe=subscription,
            concurrency=concurrency,
            tries=tries if on_error == "again" else None,
            shared=group is not None,
        )
        register = cast("Any", Registrator).subscriber  # RedisBroker's own method creates the subscriber itself
        register(self._broker, subscriber)
        subscriber.add_call(parser_=_parser_of(topic), decoder_=_decode, dependencies_=())
        return cast("Callable[[F], F]", subscriber)


class _Subscriber(EventSubscriber):
    """A FastStream subscriber fed by a subscription of the client."""

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
        tries: int | None,
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
        self._each: dict[str, Any] = {"concurrency": concurrency} | ({"tries": tries} if tries else {})
        self._handle: Callable[[Any], Awaitable[object]] = self.process_message if tries else self.consume
        self._shared = shared
        self._subscription: Any = None

    async def start(self) -> None:
        await LogicSubscriber.start(self)

    async def stop(self) -> None:
        self.running = False
        if self._subscription:
            # running handlers may finish; in a group, unfinished events are delivered again
            await self._subscription.aclose()
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
                            await self._subscription.each(self._pass_on, **self._each)
                        finally:
                            cursor = None if self._shared else self._subscription.cursor
            except TokenbusError as e:
                self._log(logging.ERROR, f"Subscription ended: {e}", exc_info=e)
            if self.running:
                await asyncio.sleep(PAUSE_S)

    async def _pass_on(self, event: object) -> None:
        if isinstance(event, UNKNOWN):
            return  # no handler has a parameter of this type
        message: dict[str, Any] = {"type": "stream", "channel": self.stream_sub.name, "message_ids": [], "data": {}}
        await self._handle({**message, "event": event})


def _parser_of(topic: Topic) -> Callable[[Any], Awaitable[RedisStreamMessage]]:
    async def parse(message: Any) -> RedisStreamMessage:
        correlation_id = None
        if "event" not in message:  # from `TestRedisBroker`, in the format of a producer
            body, headers = BinaryMessageFormatV1.parse(message["data"][bDATA_KEY])
            message["event"] = _published(topic, message["channel"], body)
            correlation_id = headers.get("correlation_id")
        event = message["event"]
        order = order_of(event)
        return RedisStreamMessage(
            raw_message=message,
            body=b"",
            consumer=FAKE_CONSUMER,
            group=None,
            message_id=MessageId(f"{order}/{event.seq}"),
            correlation_id=correlation_id or order,
        )

    return parse


def _published(topic: Topic, stream: str, body: bytes) -> Any:
    """Decode an event published by a test. Raises Malformed, or msgspec.ValidationError for an invalid sentence."""
    if topic == "sentences":
        return msgspec.json.decode(body, type=Sentence)
    return topic_event(topic, stream, (b"0-0", {b"__data__": body}))


async def _decode(message: RedisStreamMessage) -> Any:
    return cast("dict[str, Any]", message.raw_message)["event"]

"""A FastStream subscriber whose messages come from the bus runtime and not from FastStream's own read.

FastStream reads one stream a subscriber with a consumer group, pauses five seconds after an error and stops the
app when a group is gone (faststream 0.7.8, redis/subscriber/usecases/stream_subscriber.py). An ordered stage reads
all partitions it owns with plain XREAD, and a worker must be back within a second of its server. So the read is
ours; handlers, middlewares, lifespan and the AsyncAPI page stay FastStream's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.middlewares import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.message import FAKE_CONSUMER, RedisBatchStreamMessage
from faststream.redis.subscriber.config import RedisSubscriberConfig, RedisSubscriberSpecificationConfig
from faststream.redis.subscriber.specification import StreamSubscriberSpecification
from faststream.redis.subscriber.usecases import StreamBatchSubscriber
from faststream.redis.subscriber.usecases.basic import LogicSubscriber
from redis.exceptions import RedisError

if TYPE_CHECKING:
    from anyio import Event
    from faststream.redis.configs import RedisBrokerConfig

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

T = TypeVar("T")
Read = Callable[[], Awaitable[T | None]]
"""The next delivery, or None where there was none for a while. May raise redis-py's errors: it is asked again soon."""

LONGEST_PAUSE_S = 0.5


class SourceSubscriber(StreamBatchSubscriber):
    """Hands each delivery of ``read`` to the handler as one message, one at a time."""

    def __init__(self, broker: RedisBroker, stream: StreamSub, title: str, description: str, read: Read[Any]) -> None:
        outer = cast("RedisBrokerConfig", broker.config)
        config = RedisSubscriberConfig(
            stream_sub=stream, no_reply=True, _outer_config=outer, _ack_policy=AckPolicy.MANUAL
        )
        about = RedisSubscriberSpecificationConfig(title_=title, description_=description)
        calls = CallsCollection[Any]()
        super().__init__(config, StreamSubscriberSpecification(outer, about, calls, stream), calls)
        self._read = read

    async def start(self) -> None:
        await LogicSubscriber.start(self)

    async def _consume(self, *args: Any, start_signal: Event) -> None:
        start_signal.set()
        pause = 0.02
        while self.running:
            try:
                delivery = await self._read()
                pause = 0.02
            except (RedisError, OSError) as e:
                log.warning("read_failed", stream=self.stream_sub.name, error=str(e))
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
                continue
            if delivery is not None:
                name = self.stream_sub.name
                message = {"type": "bstream", "channel": name, "message_ids": [], "data": [b""], "delivery": delivery}
                await self.consume_one(message)


async def _parse(message: Any) -> RedisBatchStreamMessage:
    return RedisBatchStreamMessage(raw_message=message, body=b"", consumer=FAKE_CONSUMER, group=None)


async def _decode(message: RedisBatchStreamMessage) -> Any:
    return cast("dict[str, Any]", message.raw_message)["delivery"]


def attach(
    broker: RedisBroker,
    *,
    stream: str,
    title: str,
    description: str,
    read: Read[T],
    handle: Callable[[T], Awaitable[None]],
) -> None:
    """Let ``handle`` work on what ``read`` gives: a FastStream handler of ``stream``, as the AsyncAPI page calls it."""
    subscriber = SourceSubscriber(broker, StreamSub(stream, batch=True), title, description, read)
    register: Any = Registrator.subscriber  # RedisBroker's own takes a stream and makes the subscriber itself
    register(broker, subscriber)
    subscriber.add_call(parser_=_parse, decoder_=_decode, dependencies_=())

    async def handler(delivery: Any) -> None:
        await handle(delivery)

    handler.__name__ = title
    cast("Any", subscriber)(handler)

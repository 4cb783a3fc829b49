"""A FastStream subscriber whose messages come from the bus runtime instead of FastStream's own read.

FastStream reads one stream per subscriber with a consumer group, pauses five seconds after an error and stops the app
when a group is gone (faststream 0.7.8, redis/subscriber/usecases/stream_subscriber.py). An ordered stage reads all its
partitions with plain XREAD, and a worker must be back within a second of its server. So the read is ours; handlers,
middlewares, lifespan and the AsyncAPI page are FastStream's.

FastStream's work per message costs more CPU than a batch of a few chunks, because the caches are cold between two
batches (`make bench`: 300 µs per wake-up). So consecutive deliveries may form one message: a stretch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from faststream.middlewares import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.message import FAKE_CONSUMER, RedisBatchStreamMessage
from faststream.redis.subscriber.config import RedisSubscriberConfig, RedisSubscriberSpecificationConfig
from faststream.redis.subscriber.specification import StreamSubscriberSpecification
from faststream.redis.subscriber.usecases import StreamBatchSubscriber
from faststream.redis.subscriber.usecases.basic import LogicSubscriber
from redis.exceptions import RedisError

from tokenbus.bus.liveness import Liveness, beat
from tokenbus.bus.server.retry import Defects
from tokenbus.events.schemas import standalone
from tokenbus.faststream_internals import CallsCollection, Registrator

if TYPE_CHECKING:
    from anyio import Event
    from faststream.redis.configs import RedisBrokerConfig

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

T = TypeVar("T")
Read = Callable[[], Awaitable[T | None]]
"""Returns the next delivery, or None if there was none for a while. May raise redis-py's errors; it is called again
soon.
"""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5


class _Specification(StreamSubscriberSpecification):
    """The specification of a subscriber; documents ``payload`` if it is given."""

    def __init__(self, outer: Any, about: Any, calls: Any, stream: StreamSub, payload: Any) -> None:
        super().__init__(outer, about, calls, stream)
        self._payload = payload

    def get_payloads(self) -> list[tuple[dict[str, Any], str]]:
        if self._payload is None:
            return super().get_payloads()
        title = self.config.title_ or self.call_name
        return [({**standalone(self._payload), "title": f"{title}:Message:Payload"}, title.title())]


class SourceSubscriber(StreamBatchSubscriber):
    """Passes what ``read`` returns to the handler, one message at a time. A message is a delivery and those that
    follow directly, for up to ``stretch_s``.
    """

    def __init__(
        self,
        broker: RedisBroker,
        stream: StreamSub,
        title: str,
        description: str,
        *,
        read: Read[Any],
        stretch_s: float,
        liveness: Liveness,
        payload: Any,
    ) -> None:
        outer = cast("RedisBrokerConfig", broker.config)
        config = RedisSubscriberConfig(
            stream_sub=stream, no_reply=True, _outer_config=outer, _ack_policy=AckPolicy.MANUAL
        )
        about = RedisSubscriberSpecificationConfig(title_=title, description_=description)
        calls = CallsCollection[Any]()
        super().__init__(config, _Specification(outer, about, calls, stream, payload), calls)
        self._read = read
        self._liveness = liveness
        self._task_name = f"subscriber {title}"
        liveness.expected.add(self._task_name)
        self._stretch_s = stretch_s
        self._pause = FIRST_PAUSE_S
        self._defects = Defects()
        self._handler_defects = Defects()
        self._broken: Exception | None = None
        """The last error of a handler that only fails. It ends this subscriber, and so the worker."""
        self._waiting: asyncio.Timeout | None = None
        """Scope of the read that is waiting."""

    async def start(self) -> None:
        await LogicSubscriber.start(self)

    async def stop(self) -> None:
        self.running = False
        if self._waiting:
            self._waiting.reschedule(0)  # otherwise FastStream would wait for the end of the stretch
        await super().stop()

    async def _consume(self, *args: Any, start_signal: Event) -> None:
        self._liveness.enter(self._task_name)
        start_signal.set()
        name = self.stream_sub.name
        while self.running:
            delivery = await self._next(name)
            if delivery is not None:
                stretch = self._stretch(delivery, name)
                message = {"type": "bstream", "channel": name, "message_ids": [], "data": [b""], "stretch": stretch}
                await self.consume_one(message)
            if self._broken:
                raise self._broken

    async def _stretch(self, delivery: Any, name: str) -> AsyncGenerator[Any]:
        """Yield the delivery and those after it, until there is none for a while."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._stretch_s
        while delivery is not None:
            yield delivery
            delivery = await self._next(name) if self.running and clock() < until else None

    def handled(self) -> None:
        """Record a delivery that was handled."""
        self._handler_defects.none()

    def not_handled(self, error: Exception) -> None:
        """Record a delivery whose handler failed; its queue or its stage gives it out again."""
        # FastStream has no logger here and would drop it silently.
        log.error("handler_failed", handler=self._task_name, exc_info=error)
        self._liveness.failed_work(self._task_name)
        try:
            self._handler_defects.count(error)
        except Exception as e:
            self._broken = e

    async def _next(self, name: str) -> Any:
        beat()
        if self._broken:
            return None
        try:
            try:
                async with asyncio.timeout(None) as self._waiting:
                    delivery = await self._read()
            finally:
                self._waiting = None  # `stop` may also come during the pause
        except Exception as e:  # other errors are defects, which must not end the reading silently
            if not self.running:
                return None
            defect = None if isinstance(e, RedisError | OSError) else e
            log.warning("read_failed", stream=name, error=str(e), exc_info=defect)
            self._defects.count(e)
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
            return None
        self._pause = FIRST_PAUSE_S
        self._defects.none()
        return delivery


async def _parse(message: Any) -> RedisBatchStreamMessage:
    return RedisBatchStreamMessage(raw_message=message, body=b"", consumer=FAKE_CONSUMER, group=None)


async def _decode(message: RedisBatchStreamMessage) -> Any:
    return cast("dict[str, Any]", message.raw_message)["stretch"]


def attach(
    broker: RedisBroker,
    *,
    stream: str,
    title: str,
    description: str,
    read: Read[T],
    handle: Callable[[T], Awaitable[None]],
    liveness: Liveness,
    stretch_s: float = 0.0,
    payload: Any = None,
) -> None:
    """Let ``handle`` process what ``read`` returns, as a FastStream handler of ``stream`` on the AsyncAPI page.

    Both call `beat` while they wait. Deliveries within one stretch, up to ``stretch_s`` long, are one message to
    FastStream, its middlewares and its metrics. ``payload``: the type of an entry, for the AsyncAPI page.
    """
    subscriber = SourceSubscriber(
        broker,
        StreamSub(stream, batch=True),
        title,
        description,
        read=read,
        stretch_s=stretch_s,
        liveness=liveness,
        payload=payload,
    )
    register = cast("Any", Registrator).subscriber  # RedisBroker's own method creates the subscriber itself
    register(broker, subscriber)
    subscriber.add_call(parser_=_parse, decoder_=_decode, dependencies_=())

    async def handler(stretch: Any) -> None:
        async with aclosing(stretch):
            async for delivery in stretch:
                try:
                    await handle(delivery)
                except Exception as e:
                    subscriber.not_handled(e)
                else:
                    subscriber.handled()

    handler.__name__ = title
    cast("Any", subscriber)(handler)

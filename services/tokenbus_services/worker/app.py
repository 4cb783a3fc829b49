"""The FastStream ASGI app around a service: lifespan, `/health`, `/ready`, `/metrics`, `/asyncapi`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import structlog
from fast_depends.msgspec import MsgSpecSerializer
from faststream.asgi import AsgiFastStream, AsgiResponse, get
from faststream.redis import RedisBroker, RedisClusterBroker, RedisSentinelBroker, StreamSub
from faststream.redis.prometheus import RedisPrometheusMiddleware
from faststream.specification import AsyncAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.process_collector import ProcessCollector
from redis.exceptions import RedisError

from tokenbus import __version__
from tokenbus.bus.keys import PublicTopic
from tokenbus.bus.server import ServerUrl, parse_url
from tokenbus_services.settings import Settings
from tokenbus_services.worker.payloads import payload

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MEASURE_S = 1.0
"""How long a look at the server may hold up the metrics page."""


class Service(Protocol):
    """What the app runs: opened before the subscribers start, closed before they stop."""

    name: str

    @property
    def ready(self) -> bool:
        """Whether it can do its work now."""
        ...

    async def open(self) -> None:
        """Connect and sign on. Raises TokenbusError where the service cannot work as it is set up."""
        ...

    async def close(self) -> None:
        """Finish what is in hand, give the rest back."""
        ...


def worker_name() -> str:
    """A name that no other worker has: host, process, chance (a container's first process is always 1)."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"


def make_broker(settings: Settings, registry: CollectorRegistry) -> RedisBroker:
    """FastStream's broker for the server that the settings name."""
    assert settings.redis_url
    url = parse_url(settings.redis_url)
    options: dict[str, Any] = {
        "middlewares": (RedisPrometheusMiddleware(registry=registry),),
        "apply_types": False,
        "serializer": MsgSpecSerializer(),
        "logger": None,
        "specification_url": url.safe,
    }
    if url.topology == "sentinel":
        return RedisSentinelBroker(sentinels=list(url.nodes), sentinel_master_name=url.master, **_login(url), **options)
    if url.topology == "cluster":
        return RedisClusterBroker(startup_nodes=list(url.nodes), **_login(url), **options)
    scheme, separator, rest = settings.redis_url.partition("://")
    return RedisBroker(scheme.replace("valkey", "redis") + separator + rest, **options)


def _login(url: ServerUrl) -> dict[str, Any]:
    return {name: value for name in ("username", "password") if (value := getattr(url, name))}


def declare_topics(broker: RedisBroker, settings: Settings, topics: Sequence[PublicTopic]) -> None:
    """Put the public topics that a service writes on its AsyncAPI page. The commit script does the writing."""
    for topic in topics:
        broker.publisher(
            stream=StreamSub(f"{settings.prefix}:{{n}}:{topic}"),
            title=topic,
            description=f"Public topic `{topic}`: JSON objects in `__data__`, one stream for each partition n.",
            schema=payload(topic),
        )


def make_app(
    service: Service,
    broker: RedisBroker,
    registry: CollectorRegistry,
    *,
    measure: Callable[[], Awaitable[None]] | None = None,
) -> AsgiFastStream:
    """The app of one service. `/health`: the process lives; `/ready`: it reaches its server and can work.

    ``measure`` is awaited whenever somebody reads `/metrics`. A server that is away does not keep the page from them.
    """
    ProcessCollector(registry=registry)

    @get
    async def health(scope: Any) -> AsgiResponse:
        return _json(200, {"service": service.name, "status": "alive", "version": __version__})

    @get
    async def ready(scope: Any) -> AsgiResponse:
        ok = service.ready
        return _json(200 if ok else 503, {"service": service.name, "status": "ready" if ok else "not ready"})

    @get
    async def metrics(scope: Any) -> AsgiResponse:
        if measure:
            with suppress(RedisError, OSError):
                async with asyncio.timeout(MEASURE_S):
                    await measure()
        return AsgiResponse(generate_latest(registry), 200, {"content-type": CONTENT_TYPE_LATEST})

    async def start() -> None:
        await service.open()
        log.info("started", service=service.name)

    async def stop() -> None:
        await service.close()
        log.info("stopped", service=service.name)

    return AsgiFastStream(
        broker,
        asgi_routes=[("/health", health), ("/ready", ready), ("/metrics", metrics)],
        logger=None,
        on_startup=[start],
        on_shutdown=[stop],
        specification=AsyncAPI(title=f"tokenbus {service.name}", version=__version__),
        asyncapi_path="/asyncapi",
    )


def _json(status: int, body: dict[str, str]) -> AsgiResponse:
    return AsgiResponse(msgspec.json.encode(body), status, {"content-type": "application/json"})

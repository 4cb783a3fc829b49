"""The FastStream ASGI app around a service: lifespan, `/health`, `/ready`, `/metrics`, and `/asyncapi`
(http_pages.py).
"""

from __future__ import annotations

import asyncio
import html
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol
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
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import ServerUrl, parse_url
from tokenbus.bus.server.url import plain_url
from tokenbus.events.public import BlockEvent, Chunk, RunEvent, ToolProgress
from tokenbus.events.schemas import standalone
from tokenbus_services.runtime.metrics import PassedOver
from tokenbus_services.runtime.supervision import WorkerSupervisor
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

EMBEDDED = "tokenbus.embedded"
"""Extension of the lifespan's ASGI scope: the app must not end the process."""
MEASURE_S = 1.0
"""Longest time that measuring the server may delay the metrics page."""


class Service(Protocol):
    """What the app runs: opened before the subscribers start, closed before they stop."""

    name: str
    liveness: Liveness
    """The tasks that the service depends on."""

    @property
    def ready(self) -> bool:
        """Whether it can work now."""
        ...

    async def open(self) -> None:
        """Connect and register. Raises TokenbusError if the service cannot work with its configuration."""
        ...

    async def close(self) -> None:
        """Finish current work and hand the rest back; at once if ``liveness`` has failed."""
        ...


class WorkerApp(AsgiFastStream):
    """FastStream's app of a service; shuts itself down if its worker cannot continue."""

    supervisor: WorkerSupervisor

    async def lifespan(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises WorkerStuck after everything is handed over, besides errors of startup and shutdown."""
        self.supervisor.embedded = EMBEDDED in scope.get("extensions", {})
        await super().lifespan(scope, self.supervisor.wait_or_fail(receive), send)
        if self.supervisor.error:
            raise self.supervisor.error


def worker_name() -> str:
    """Return a unique name from host, process and random part (a container's first process always has id 1)."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"


def make_broker(settings: Settings, registry: CollectorRegistry) -> RedisBroker:
    """Create FastStream's broker for the server in the settings."""
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
    scheme, separator, rest = plain_url(settings.redis_url).partition("://")
    return RedisBroker(scheme.replace("valkey", "redis") + separator + rest, **options)


def _login(url: ServerUrl) -> dict[str, Any]:
    return {name: value for name in ("username", "password") if (value := getattr(url, name))}


def declare_topics(broker: RedisBroker, settings: Settings, topics: Sequence[PublicTopic]) -> None:
    """List the public topics that a service writes on its AsyncAPI page. The commit script does the writing."""
    for topic in topics:
        broker.publisher(
            stream=StreamSub(f"{settings.prefix}:{{n}}:{topic}"),
            title=topic,
            description=f"Public topic `{topic}`: JSON objects in `__data__`, one stream for each partition n.",
            schema=Annotated[dict[str, Any], _Payload(_EVENTS[topic])],
        )


def make_app(
    service: Service,
    broker: RedisBroker,
    registry: CollectorRegistry,
    *,
    stuck_s: float,
    measure: Callable[[], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    says: Callable[[], dict[str, Any]] = dict,
) -> AsgiFastStream:
    """Create the app of one service. `/health`: the process is alive; `/ready`: it reaches its server and all its tasks
    run.

    ``stuck_s``: a task without progress for this long ends the worker. ``measure``: awaited whenever `/metrics` is
    read. If the server is away, the page is still served. ``drain``: awaited when the worker stops, before the service
    closes: it takes nothing new and finishes what it has, watched as before. ``says``: what else is on `/health`.
    """
    ProcessCollector(registry=registry)
    passed_over = PassedOver(registry)
    service.liveness.failed_work = passed_over.count
    supervisor = WorkerSupervisor(service.liveness, stuck_s=stuck_s)

    @get
    async def health(scope: Any) -> AsgiResponse:
        return json_answer(200, {"service": service.name, "status": "alive", "version": __version__, **says()})

    @get
    async def ready(scope: Any) -> AsgiResponse:
        ok = service.ready and supervisor.is_healthy
        return json_answer(200 if ok else 503, {"service": service.name, "status": "ready" if ok else "not ready"})

    @get
    async def metrics(scope: Any) -> AsgiResponse:
        if measure:
            with suppress(RedisError, OSError):
                async with asyncio.timeout(MEASURE_S):
                    await measure()
        return AsgiResponse(generate_latest(registry), 200, {"content-type": CONTENT_TYPE_LATEST})

    async def start() -> None:
        await service.open()
        supervisor.open()
        log.info("started", service=service.name)

    async def stop() -> None:
        supervisor.stopping()
        if drain:
            log.info("draining", service=service.name)
            await drain()
        await supervisor.close()
        await service.close()
        supervisor.closed()
        log.info("stopped", service=service.name)

    def document() -> Any:
        return app.schema.to_specification().to_jsonable()

    app = WorkerApp(
        broker,
        asgi_routes=[("/health", health), ("/ready", ready), ("/metrics", metrics), *document_routes(document)],
        logger=None,
        on_startup=[start],
        on_shutdown=[stop],
        specification=AsyncAPI(title=f"tokenbus {service.name}", version=__version__),
        asyncapi_path=None,  # see runtime/app/service_app.py for the reason
    )
    app.supervisor = supervisor
    return app


# Payload schemas for the AsyncAPI page, in FastStream's form: it uses pydantic, which does not know msgspec types.

_EVENTS: dict[PublicTopic, Any] = {
    "visible": Chunk,
    "chunks": Chunk,
    "blocks": BlockEvent | ToolProgress,
    "runs": RunEvent,
}


@dataclass(frozen=True)
class _Payload:
    """An annotation that gives pydantic the JSON Schema of msgspec types. It is made when the page is asked for: that
    takes longer than all else that an app's creation does.

    The schema contains no references, because pydantic only accepts its own definitions.
    """

    types: Any

    def __get_pydantic_json_schema__(self, core_schema: object, handler: object) -> dict[str, Any]:
        return standalone(self.types)


# FastStream's own document page loads scripts from other hosts and also serves ``POST /asyncapi/try``, which wraps a
# test broker around the live one: after a single request the worker reads nothing more. This page has no scripts, and
# all pages are read-only.


Route = tuple[str, Any]

_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}}
pre{{overflow:auto;background:#8881;padding:1rem}}
td,th{{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}}
</style>
<h1>{title}</h1>
<p>AsyncAPI {version}. The same as JSON: <a href="asyncapi.json">asyncapi.json</a>.</p>
<table><tr><th>channel</th><th>stream</th><th>what it holds</th></tr>{channels}</table>
<h2>Document</h2>
<pre>{document}</pre>
</html>
"""


def document_routes(document: Callable[[], Any]) -> list[Route]:
    """The routes ``/asyncapi``, a page for people, and ``/asyncapi.json`` of this AsyncAPI document."""

    # Rendered once, at the first request: it never changes, and requests must not cost the service time.
    made = cache(document)
    page = cache(
        lambda: AsgiResponse(_page(made()).encode(), 200, {"content-type": "text/html; charset=utf-8", **_SAFE})
    )
    data = cache(lambda: json_answer(200, made()))

    @get(include_in_schema=False)
    async def as_page(scope: Any) -> AsgiResponse:
        return page()

    @get(include_in_schema=False)
    async def as_json(scope: Any) -> AsgiResponse:
        return data()

    return [("/asyncapi", as_page), ("/asyncapi.json", as_json)]


def json_answer(status: int, body: Any) -> AsgiResponse:
    """A JSON response that browsers do not sniff as another type."""
    headers = {"content-type": "application/json", "x-content-type-options": "nosniff"}
    return AsgiResponse(msgspec.json.encode(body), status, headers)


def _page(document: dict[str, Any]) -> str:
    channels: dict[str, dict[str, Any]] = document.get("channels", {})
    rows = [
        _row(name, str(channel.get("address", "")), str(channel.get("description", "")))
        for name, channel in channels.items()
    ]
    pretty = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    return _PAGE.format(
        title=html.escape(document["info"]["title"]),
        version=html.escape(document["asyncapi"]),
        channels="".join(rows),
        document=html.escape(pretty),
    )


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"

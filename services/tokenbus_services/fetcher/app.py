"""The fetcher's application."""

from __future__ import annotations

from collections.abc import Callable

from faststream.asgi import AsgiFastStream
from prometheus_client import Gauge

from tokenbus.events.requests import Request
from tokenbus_services.fetcher.limits.wait_queue import AdmissionMetrics
from tokenbus_services.fetcher.service import FetcherService
from tokenbus_services.fetcher.uploads.plan import UploadMetrics
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import make_app
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings


def fetcher(core: WorkerCore, *, prefers: Callable[[int], bool] | None = None) -> FetcherService:
    """Add a fetcher to this process. ``prefers``: see `FetcherService`."""
    settings, registry, broker = core.settings, core.registry, core.broker
    service = FetcherService(
        core, settings.tool_definitions, AdmissionMetrics(registry), UploadMetrics(registry), prefers=prefers
    )
    core.watch_deployment()
    admission = service.admission
    running = Gauge("tokenbus_attempts_running", "Provider calls in progress.", registry=registry)
    running.set_function(lambda: admission.running)
    waiting = Gauge("tokenbus_attempts_waiting", "Runs that wait for their turn to be called.", registry=registry)
    waiting.set_function(lambda: admission.waiting)
    attach(
        broker,
        stream=settings.keys.requests,
        title="intake",
        description="Requests: one JSON object in `__data__`; raw JSON, msgpack and the FastStream envelope are taken.",
        read=service.read_requests,
        handle=service.accept_requests,
        liveness=service.liveness,
        payload=Request,
    )
    attach(
        broker,
        stream=f"{settings.prefix}:{{n}}:turns",
        title="fetcher",
        description="Attempts to make; the provider's bytes go to `raw`.",
        read=service.read_turns,
        handle=service.start_turns,
        liveness=service.liveness,
    )
    return service


def create(settings: Settings) -> AsgiFastStream:
    core = WorkerCore(settings, "fetcher")
    service = fetcher(core)
    return make_app(
        service, core.broker, core.registry, stuck_s=core.stuck_s, measure=core.measure, drain=service.drain
    )

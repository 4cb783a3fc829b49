"""The fetcher's application."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream
from prometheus_client import CollectorRegistry, Gauge

from tokenbus_services.fetcher.metrics import AdmissionMetrics, UploadMetrics
from tokenbus_services.fetcher.service import FetcherService
from tokenbus_services.runtime.app import make_app, make_broker
from tokenbus_services.runtime.asyncapi_payloads import request_payload
from tokenbus_services.runtime.faststream_source import attach
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import Settings


def create(settings: Settings) -> AsgiFastStream:
    """Create one fetcher."""
    registry = CollectorRegistry()
    broker = make_broker(settings, registry)
    service = FetcherService(settings, settings.tool_definitions, AdmissionMetrics(registry), UploadMetrics(registry))
    admission = service.admission
    running = Gauge("tokenbus_attempts_running", "Provider calls in hand.", registry=registry)
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
        payload=request_payload(),
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
    assert settings.redis_url
    return make_app(service, broker, registry, stuck_s=stuck_after_s(settings.redis_url))

"""The recorder's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream
from prometheus_client import CollectorRegistry

from tokenbus.errors import SettingsError
from tokenbus_services.recorder.service import RecordMetrics, RecordService
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import make_app, make_broker
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import Settings
from tokenbus_services.telemetry import open_tracer


def create(settings: Settings) -> AsgiFastStream:
    """Create a recorder. Raises SettingsError if the deployment neither records nor archives."""
    if not settings.needs_recorder:
        raise SettingsError(
            "settings",
            "records",
            "nothing is recorded or archived: add a table [records] or [archive]; it may be empty",
        )
    registry = CollectorRegistry()
    broker = make_broker(settings, registry)
    service = RecordService(settings, RecordMetrics(registry), open_tracer(settings, "recorder", registry))
    attach(
        broker,
        stream=f"{settings.prefix}:{{n}}:records",
        title="recorder",
        description="Runs that are over, each to be recorded in the blob store, or archived.",
        read=service.read,
        handle=service.start,
        liveness=service.liveness,
    )
    assert settings.redis_url
    return make_app(service, broker, registry, stuck_s=stuck_after_s(settings.redis_url), drain=service.drain)

"""The app of the webhooks' worker."""

from __future__ import annotations

import os

from faststream.asgi import AsgiFastStream
from prometheus_client import CollectorRegistry

from tokenbus.errors import SettingsError
from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import make_app, make_broker
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import Settings
from tokenbus_services.webhooks.service import WebhookMetrics, WebhookService


def create(settings: Settings) -> AsgiFastStream:
    """Create a worker. Raises SettingsError if there is no webhook, or one cannot work."""
    if not settings.webhooks:
        raise SettingsError("settings", "webhooks", "there is none, so nobody is told anything")
    registry = CollectorRegistry()
    broker = make_broker(settings, registry)
    service = WebhookService(settings, WebhookMetrics(registry), os.environ)
    attach(
        broker,
        stream=f"{settings.prefix}:{{n}}:notices",
        title="webhooks",
        description="Ends of runs of which receivers are told.",
        read=service.read,
        handle=service.start,
        liveness=service.liveness,
    )
    assert settings.redis_url
    return make_app(service, broker, registry, stuck_s=stuck_after_s(settings.redis_url), drain=service.drain)

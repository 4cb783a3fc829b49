"""The app of the webhooks' worker."""

from __future__ import annotations

import os

from faststream.asgi import AsgiFastStream

from tokenbus.errors import SettingsError
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings
from tokenbus_services.webhooks.service import WebhookService


def create(settings: Settings) -> AsgiFastStream:
    """Create a worker. Raises SettingsError if there is no webhook, or one cannot work."""
    if not settings.webhooks:
        raise SettingsError("settings", "webhooks", "there is none: add a table [webhooks.NAME]")
    return WebhookService(WorkerCore(settings, "webhooks"), os.environ).app()

"""The recorder's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus.errors import SettingsError
from tokenbus_services.recorder.service import RecordService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings


def create(settings: Settings) -> AsgiFastStream:
    """Create a recorder. Raises SettingsError if the deployment neither records nor archives."""
    if not settings.needs_recorder:
        raise SettingsError(
            "settings",
            "records",
            "nothing is recorded or archived: add a table [records] or [archive]; it may be empty",
        )
    return RecordService(WorkerCore(settings, "recorder")).app()

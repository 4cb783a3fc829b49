"""The pipeline worker's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus_services.fetcher.app import fetcher
from tokenbus_services.normalizer.app import normalizer
from tokenbus_services.parser.app import parser
from tokenbus_services.pipeline.service import PipelineService
from tokenbus_services.runtime.app.service_app import make_app
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings


def create(settings: Settings) -> AsgiFastStream:
    """Create one pipeline worker. Raises SettingsError if the blob store is not usable."""
    core = WorkerCore(settings, "pipeline")
    first, second = normalizer(core), parser(core)
    intake = fetcher(core, prefers=lambda partition: partition in first.owned and partition in second.owned)
    service = PipelineService(core, intake, first, second)
    return make_app(service, core.broker, core.registry, stuck_s=core.stuck_s, measure=core.measure)

"""The normalizer's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus_services.blobs.client import loader_of
from tokenbus_services.normalizer.image_offload import ImageKeeper
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.runtime.worker_core import StageService, WorkerCore, stage_app
from tokenbus_services.settings import Settings


def normalizer(core: WorkerCore) -> StageService:
    """Add a normalizer to this process. Raises SettingsError if the blob store is not usable."""
    keys = core.settings.keys
    images = ImageKeeper(loader_of(core.settings.blobs), core.registry)
    tracer, now_ms = core.tracer, core.server.clock.now_ms
    return StageService(
        core,
        name="normalizer",
        topic="raw",
        logic=lambda partition: NormalizerLogic(partition, keys, images, tracer, now_ms),
        downstream="parser",
        closing=images.aclose,
        description="Raw provider bytes, as frames; normalized events go to `events`.",
    )


def create(settings: Settings) -> AsgiFastStream:
    """Create a normalizer worker. Raises SettingsError if the blob store is not usable."""
    core = WorkerCore(settings, "normalizer")
    return stage_app(normalizer(core), core)

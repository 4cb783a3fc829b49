"""The normalizer's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream
from prometheus_client import CollectorRegistry

from tokenbus_services.blobs.loader import loader_of
from tokenbus_services.normalizer.image_offload import ImageKeeper
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.runtime.stage_service import stage_app
from tokenbus_services.settings import Settings


def create(settings: Settings) -> AsgiFastStream:
    """Create a normalizer worker. Raises SettingsError if the blob store is not usable."""
    keys, registry = settings.keys, CollectorRegistry()
    images = ImageKeeper(loader_of(settings.blobs), registry)
    return stage_app(
        settings,
        name="normalizer",
        topic="raw",
        logic=lambda partition: NormalizerLogic(partition, keys, images),
        downstream="parser",
        registry=registry,
        closing=images.aclose,
        description="Raw provider bytes, as frames; normalized events go to `events`.",
    )

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
    """One worker of the normalizer. Raises SettingsError for a blob store that cannot be used."""
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
        description="Raw provider bytes, as frames; normalised events go to `events`.",
    )

"""The normalizer's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.settings import Settings
from tokenbus_services.worker.stage import stage_app


def create(settings: Settings) -> AsgiFastStream:
    """One worker of the normalizer."""
    keys = settings.keys
    return stage_app(
        settings,
        name="normalizer",
        topic="raw",
        logic=lambda partition: NormalizerLogic(partition, keys),
        downstream="parser",
        description="Raw provider bytes, as frames; normalised events go to `events`.",
    )

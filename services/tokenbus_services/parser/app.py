"""The parser's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus.bus.keys import PUBLIC_TOPICS
from tokenbus_services.parser.logic import ParserLogic
from tokenbus_services.settings import Settings
from tokenbus_services.worker.stage import stage_app


def create(settings: Settings) -> AsgiFastStream:
    """One worker of the parser."""
    keys = settings.keys

    def logic(partition: int) -> ParserLogic:
        return ParserLogic(
            partition,
            keys,
            topics=settings.topics,
            open_run_ms=round(settings.retention.open_run_s * 1000),
            finished_run_ms=round(settings.retention.finished_run_s * 1000),
        )

    return stage_app(
        settings,
        name="parser",
        topic="events",
        logic=logic,
        description="Everything that can change a run's output, in one total order a partition.",
        publishes=[t for t in PUBLIC_TOPICS if t == "runs" or t in settings.topics],
    )

"""What the streams of an AsyncAPI page carry, as FastStream wants it: it asks pydantic, which knows no msgspec."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from tokenbus.bus.keys import PublicTopic
from tokenbus.events.public import BlockEvent, Chunk, RunEvent, ToolProgress
from tokenbus.events.requests import Request
from tokenbus.events.schemas import standalone

_EVENTS: dict[PublicTopic, Any] = {
    "visible": Chunk,
    "chunks": Chunk,
    "blocks": BlockEvent | ToolProgress,
    "runs": RunEvent,
}


def payload(topic: PublicTopic) -> Any:
    """A type for FastStream that has the JSON Schema of the topic's events. Pydantic takes no definitions but its own,
    so the schema refers to nothing."""
    return Annotated[dict[str, Any], WithJsonSchema(standalone(_EVENTS[topic]))]


def request_payload() -> dict[str, Any]:
    """The JSON Schema of what the inbound stream carries."""
    return standalone(Request)

"""Payload schemas for the AsyncAPI page, in FastStream's form: it uses pydantic, which does not know msgspec types."""

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
    """Return a type for FastStream with the JSON Schema of the topic's events. The schema contains no references,
    because pydantic only accepts its own definitions.
    """
    return Annotated[dict[str, Any], WithJsonSchema(standalone(_EVENTS[topic]))]


def request_payload() -> dict[str, Any]:
    """Return the JSON Schema of the inbound stream's entries."""
    return standalone(Request)

"""Events of any topic."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from tokenbus.events.decisions import Decided
from tokenbus.events.public import PublicEvent, UnknownEvent
from tokenbus.events.sessions import SessionTopicEvent, UnknownSessionEvent

TopicEvent: TypeAlias = PublicEvent | Decided | SessionTopicEvent
"""An event of any topic."""
UNKNOWN = (UnknownEvent, UnknownSessionEvent)
"""The types that an event of a newer version is read as."""

T = TypeVar("T")


def as_written(event: T) -> T | dict[str, object]:
    """The event, or of one that a newer version wrote all its fields."""
    return event.fields if isinstance(event, UNKNOWN) else event


def type_of(event: msgspec.Struct) -> str:
    """The event's type, as on the wire."""
    return event.event_type if isinstance(event, UNKNOWN) else str(event.__struct_config__.tag)

"""Decodes stream entries into events: logs of runs and sessions, public topics, and the topics `decisions` and
`sessions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.errors import Malformed
from tokenbus.events import decisions
from tokenbus.events.public import TERMINAL, PublicEvent, UnknownEvent, decode
from tokenbus.events.sessions import (
    AnySessionEvent,
    SessionEvent,
    SessionTopicEvent,
    UnknownSessionEvent,
    session_ref,
)
from tokenbus.events.topics import TopicEvent


class OfRun(Protocol):
    """Anything that belongs to a run."""

    @property
    def run(self) -> str: ...


class _Envelope(msgspec.Struct):
    """The fields that events of all types have."""

    type: str
    run: str
    turn: int
    attempt: int
    seq: int | None = None
    n: int | None = None
    """Replaces ``seq`` in events that belong to no run's log."""


E = TypeVar("E")
U = TypeVar("U")
_ENDS = frozenset(str(kind.__struct_config__.tag) for kind in TERMINAL)
_envelope = msgspec.json.Decoder(_Envelope)
_in_session_log = msgspec.json.Decoder(AnySessionEvent)
_on_session_topic = msgspec.json.Decoder(SessionTopicEvent)


def public_event(stream: str, entry: Entry) -> PublicEvent:
    """Decode an entry of a log or a public topic; `UnknownEvent` if a newer version wrote it.

    Raises Malformed, naming the stream and the entry, if it is not an event.
    """
    return _event(stream, entry, decode, _unknown)


def session_event(log: str, entry: Entry) -> AnySessionEvent:
    """Decode an entry of a session's log; `UnknownSessionEvent` if a newer version wrote it. Raises Malformed."""
    return _event(log, entry, _in_session_log.decode, _unknown_of_session)


def topic_event(topic: SubscribedTopic, stream: str, entry: Entry) -> TopicEvent:
    """Like `public_event`, for an entry of any topic."""
    match topic:
        case "decisions":
            return _event(stream, entry, decisions.decoder.decode, _unknown)
        case "sessions":
            return _event(stream, entry, _on_session_topic.decode, _unknown_of_session)
        case _:
            return public_event(stream, entry)


def order_of(event: OfRun | SessionEvent) -> str:
    """What the event is in order with: its run, or its session, whose partition this name tells as a run's does."""
    if isinstance(event, SessionEvent):
        return f"{session_ref(event.tenant or '', event.session or '')}.{event.made}"
    return event.run


def is_end(event: PublicEvent) -> bool:
    """Whether this is a terminal event, including kinds that this version cannot decode."""
    return isinstance(event, TERMINAL) or (isinstance(event, UnknownEvent) and event.event_type in _ENDS)


def _event(stream: str, entry: Entry, known: Callable[[bytes], E], stands_for: Callable[[bytes], U | None]) -> E | U:
    entry_id, fields = entry
    try:
        data = fields[b"__data__"]
        try:
            return known(data)
        except msgspec.ValidationError:
            if unknown := stands_for(data):
                return unknown
            raise
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(f"{stream} {entry_id.decode()}", f"no event: {e!r}") from None


def _unknown(data: bytes) -> UnknownEvent | None:
    try:
        about = _envelope.decode(data)
    except msgspec.ValidationError:
        return None
    seq = about.n if about.seq is None else about.seq
    if seq is None:
        return None
    return UnknownEvent(
        run=about.run,
        seq=seq,
        turn=about.turn,
        attempt=about.attempt,
        event_type=about.type,
        fields=msgspec.json.decode(data, type=dict[str, object]),
    )


def _unknown_of_session(data: bytes) -> UnknownSessionEvent | None:
    try:
        fields = msgspec.json.decode(data, type=dict[str, object])
        known = {**fields, "type": "unknown", "event_type": fields.get("type"), "fields": fields}
        return msgspec.convert(known, UnknownSessionEvent)
    except msgspec.ValidationError:
        return None

"""Decodes stream entries into events: run logs, public topics, and the topic `decisions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import msgspec

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.errors import Malformed
from tokenbus.events import decisions
from tokenbus.events.decisions import Decided
from tokenbus.events.public import TERMINAL, PublicEvent, UnknownEvent, decode

TopicEvent: TypeAlias = PublicEvent | Decided
"""An event of any topic."""


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
_ENDS = frozenset(str(kind.__struct_config__.tag) for kind in TERMINAL)
_envelope = msgspec.json.Decoder(_Envelope)


def public_event(stream: str, entry: Entry) -> PublicEvent:
    """Decode an entry of a log or a public topic; `UnknownEvent` if a newer version wrote it.

    Raises Malformed, naming the stream and the entry, if it is not an event.
    """
    return _event(stream, entry, decode)


def topic_event(topic: SubscribedTopic, stream: str, entry: Entry) -> TopicEvent:
    """Like `public_event`, for an entry of any topic."""
    return _event(stream, entry, decisions.decoder.decode) if topic == "decisions" else public_event(stream, entry)


def is_end(event: PublicEvent) -> bool:
    """Whether this is a terminal event, including kinds that this version cannot decode."""
    return isinstance(event, TERMINAL) or (isinstance(event, UnknownEvent) and event.event_type in _ENDS)


def _event(stream: str, entry: Entry, known: Callable[[bytes], E]) -> E | UnknownEvent:
    entry_id, fields = entry
    try:
        data = fields[b"__data__"]
        try:
            return known(data)
        except msgspec.ValidationError:
            if unknown := _unknown(data):
                return unknown
            raise
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(f"{stream} {entry_id.decode()}", f"no public event: {e!r}") from None


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

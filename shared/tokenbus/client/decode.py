"""Entries of streams as events: of logs and public topics, and of the topic `decisions`."""

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
"""What a topic may hold."""


class _Envelope(msgspec.Struct):
    """What every event has, whatever its type."""

    type: str
    run: str
    turn: int
    attempt: int
    seq: int | None = None
    n: int | None = None
    """In place of ``seq``, where it is of no run's log."""


E = TypeVar("E")
_ENDS = frozenset(str(kind.__struct_config__.tag) for kind in TERMINAL)
_envelope = msgspec.json.Decoder(_Envelope)


def public_event(stream: str, entry: Entry) -> PublicEvent:
    """The event that an entry of a log or a public topic holds; `UnknownEvent` for one that a newer version wrote.

    Raises Malformed, naming stream and entry, for what is no event.
    """
    return _event(stream, entry, decode)


def topic_event(topic: SubscribedTopic, stream: str, entry: Entry) -> TopicEvent:
    """The same of an entry of any topic."""
    return _event(stream, entry, decisions.decoder.decode) if topic == "decisions" else public_event(stream, entry)


def is_end(event: PublicEvent) -> bool:
    """Whether a run says nothing more, also where how it ended is not known here."""
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
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as e:
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

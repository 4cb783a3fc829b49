"""Where reasoning comes from: fields of the message, and parts of its content list.

Vendors repeat reasoning in a second field, in the same chunk or later, and in the whole message. `EmittedThinking`
finds the repetitions. OpenRouter's `reasoning_details` are reasoning in pieces, some signed or encrypted. They are sent
back with the message as received, with the pieces of each item joined
(https://openrouter.ai/docs/use-cases/reasoning-tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from tokenbus.providers.response.repeats import EmittedText, not_emitted

MAX_COMPARED_CHARS = 64 * 1024
"""How far into the reasoning a second place may repeat it in pieces of its own. Beyond that both must be equal after
each chunk.
"""

_TEXT_FIELDS = ("text", "summary")
_OPAQUE_FIELDS = ("signature", "data")


class Place(msgspec.Struct):
    """A field or the content list, as a source of reasoning."""

    brought: EmittedText = msgspec.field(default_factory=EmittedText)
    """All that came from here, new or not."""
    at: int = 0
    """How many characters of the emitted reasoning it has repeated or brought."""
    caught_up: bool = False
    """It once had all of the emitted reasoning, so that part cannot be text of its own."""
    apart: bool = False
    """It brought text that is no repetition of another place, so all of its text is new."""


class EmittedThinking(msgspec.Struct):
    """The reasoning emitted so far, and which of it each place has brought. Its fields are its whole state."""

    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    size: int = 0
    """Characters emitted."""
    first: list[str] = []
    """The emitted text, up to `MAX_COMPARED_CHARS`."""
    places: dict[str, Place] = {}
    latest: tuple[str, str] = ("", "")
    """The latest piece that was no repetition of the one before it, and its place."""

    def new_part(self, name: str, text: str) -> str:
        """Return the new part of the next piece at the place ``name``, and count it as emitted."""
        place = self.places.setdefault(name, Place())
        rest = self.emitted.rest(text) if not place.brought else None
        place.brought.add(text)
        if text == self.latest[0] and name != self.latest[1]:
            return self._emit(place, "")
        self.latest = text, name
        if place.apart or place.at >= self.size:
            return self._emit(place, text)
        if (place.brought.units, place.brought.crc) == (self.emitted.units, self.emitted.crc):
            return self._emit(place, "")
        if rest is not None:
            return self._emit(place, rest)
        first = "".join(self.first)
        known = first[place.at : place.at + len(text)]
        if known and known == text:
            place.at += len(text)
            return ""
        if known and text.startswith(known) and place.at + len(known) == self.size:
            return self._emit(place, text[len(known) :])
        place.apart = True
        return self._emit(place, text if place.caught_up else first[: place.at] + text)

    def rest_of_whole(self, name: str, texts: Sequence[str]) -> list[str]:
        """Return the new part of each text at a place in a whole message, and count it as emitted.

        The message may have all reasoning in one place, or that of each place where it came from. If a place
        contradicts what came from it, the emitted text stays.
        """
        place = self.places.get(name)
        brought = [other.brought for other in self.places.values() if other.brought]
        found = [rests for text in brought if (rests := not_emitted([text], texts)) is not None]
        rests = not_emitted([self.emitted], texts) or min(found, key=lambda rests: len("".join(rests)), default=None)
        if rests is None:
            rests = [""] * len(texts) if place else list(texts)
        place = self.places.setdefault(name, Place(apart=bool(self.size)))
        for rest in rests:
            place.brought.add(rest)
            self._emit(place, rest)
        return rests

    def _emit(self, place: Place, text: str) -> str:
        for other in self.places.values():
            if place.apart and other.at == self.size:
                other.at += len(text)
        if self.size < MAX_COMPARED_CHARS:
            self.first.append(text[: MAX_COMPARED_CHARS - self.size])
        self.size += len(text)
        self.emitted.add(text)
        place.at, place.caught_up = self.size, True
        return text


class Detail(msgspec.Struct):
    """One item: the pieces of its text, and the latest value of every other field."""

    key: str
    """Its type and index. Consecutive pieces with the same key belong to one item."""
    pieces: dict[str, list[str]] = {}
    fields: dict[str, str] = {}
    """Values are JSON."""


def pieces_of(value: object) -> list[dict[str, object]]:
    """Return the field's pieces; empty if it is not a list of objects."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, object]", item) for item in items if isinstance(item, dict)]


def text_of(pieces: list[dict[str, object]]) -> str:
    """The readable text of the pieces."""
    texts = [piece.get(field) for piece in pieces for field in _TEXT_FIELDS]
    return "".join(text for text in texts if isinstance(text, str))


def add(details: list[Detail], piece: dict[str, object]) -> int:
    """Add a piece. Return roughly how many more bytes are now buffered."""
    key = _json([piece.get("type"), piece.get("index")])
    if not (details and details[-1].key == key):
        details.append(Detail(key))
    detail = details[-1]
    size = 16
    for field, value in piece.items():
        if field in _TEXT_FIELDS and isinstance(value, str):
            if value:
                detail.pieces.setdefault(field, []).append(value)
                size += len(value)
        elif value not in (None, ""):
            detail.fields[field] = _json(value)
            size += len(detail.fields[field])
    return size


def to_send_back(details: list[Detail]) -> str | None:
    """The items as JSON; None if none has opaque data, because then nothing needs to be sent back."""
    if not any(field in detail.fields for detail in details for field in _OPAQUE_FIELDS):
        return None
    items: list[dict[str, object]] = []
    for detail in details:
        item: dict[str, object] = {field: msgspec.Raw(value) for field, value in detail.fields.items()}
        items.append(item | {field: "".join(texts) for field, texts in detail.pieces.items()})
    return _json(items)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()

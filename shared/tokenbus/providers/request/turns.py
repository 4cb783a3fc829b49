"""The normalized conversation on its way into a provider request, and what an API accepts of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import ContentPart

MOST_PLACES = 3
"""Maximum number of message locations named in one sentence; the rest are counted."""


class Notes:
    """Collects notes, with the locations that each applies to."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, where: str, problem: str) -> None:
        """Record a note for a location.

        Locations in the request's own messages share one sentence, because a long history has many. Locations in the
        run's own turns get a sentence each: they grow with every turn, and earlier sentences must not change.
        """
        key = (problem, where if where.startswith("history") else "")
        places = self._places.setdefault(key, [])
        if where not in places:
            places.append(where)

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences, in the order in which they were first recorded."""
        return tuple(f"{_listed(places)}: {problem}" for (problem, _), places in self._places.items())


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_PLACES
    return ", ".join(places[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")


Role = Literal["system", "user", "assistant", "tool"]


class Spoken(msgspec.Struct, frozen=True):
    """One message. Tool results are in separate messages of role ``tool``, each right after its calls.

    Texts are never empty, and every message has at least one part.
    """

    role: Role
    parts: list[ContentPart]
    where: str
    """Location in the request, for errors and notes."""
    participant: str | None = None
    extra: dict[str, object] = {}
    """Further fields of the message for this API."""


PartOption = Literal["title", "citations", "context", "detail", "lifetime"]
"""``lifetime`` is a time given as ``cache``; the others are fields of parts."""


class Takes(msgspec.Struct, frozen=True, kw_only=True):
    """What an API accepts in a conversation. Anything else is converted or dropped, with a note."""

    api: ApiName | None = None
    """The API whose opaque data is sent back; None: no data is."""
    thinking: tuple[str, ...] = ()
    """Opaque keys of which a thinking part needs at least one to be sent back."""
    plain_thinking: bool = False
    """Thinking is sent back without opaque data, whichever provider produced it."""
    model_images: bool = False
    """Model-generated images are sent back as the model's own."""
    unique_ids: bool = False
    """Tool ids must be unique in the whole conversation rather than within one message."""
    free_text_calls: bool = False
    """The API has calls whose input is free text. Elsewhere they become JSON with the text as ``input``."""
    names: bool = False
    """The API has a field for a participant's name."""
    part_options: frozenset[PartOption] = frozenset()
    """Options of parts that the API has. Others are left out, with a note."""
    written: bool = False
    """The whole conversation is written as one text (prefill mode), which can hold names, thinking and media."""

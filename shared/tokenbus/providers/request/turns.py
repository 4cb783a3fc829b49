"""A conversation in one form, on its way into a provider's request; and what of it an API takes."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import ContentPart

Role = Literal["system", "user", "assistant", "tool"]


class Spoken(msgspec.Struct, frozen=True):
    """One message. Tool results stand alone in messages of role ``tool``, each right after its calls.

    No part is an empty text, and no message is without parts.
    """

    role: Role
    parts: list[ContentPart]
    where: str
    """Its place in the request, for errors and notes."""
    participant: str | None = None


class Takes(msgspec.Struct, frozen=True, kw_only=True):
    """What an API takes of a conversation; what it does not is converted or left out, with a note."""

    api: ApiName | None = None
    """Whose opaque data go back; None: nobody's."""
    thinking: tuple[str, ...] = ()
    """Names of opaque data of which one must be there for thinking to go back."""
    plain_thinking: bool = False
    """Thinking goes back without any, whoever thought it."""
    model_images: bool = False
    """Images that the model made go back as the model's own."""
    unique_ids: bool = False
    """Each tool id may stand for one call of the whole conversation; else for one of a message."""
    names: bool = False
    """It has a field for a participant's name."""
    written: bool = False
    """The whole conversation is written as one text (prefill mode), in which names, thinking and media have a place."""

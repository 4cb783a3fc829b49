"""Participant names in chat mode: sent in the API's name field, written into the text, or dropped with a note.

Adjacent messages of one role may be merged later, so position never identifies a speaker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from tokenbus.events.requests import ContentPart, Generate, TextPart
from tokenbus.providers.request.notes import Notes
from tokenbus.providers.request.turns import Spoken, Takes

MAX_NAME = 64
"""Maximum characters of a name in Chat Completions."""
USER, ASSISTANT = "User", "Assistant"
"""Names written for speakers without one, next to others of the same role."""
_UNFIT = re.compile(r"[\s<|\\/>]+")


def with_speakers(messages: list[Spoken], request: Generate, takes: Takes, notes: Notes) -> list[Spoken]:
    """Return the messages with each ``participant`` set to the value of the API's name field."""
    named = [message for message in messages if message.participant and message.participant.strip()]
    if not named or takes.written:
        return messages
    if request.names_in_text:
        return _in_text(messages, request)
    if takes.names:
        return _fitted(messages, named, notes)
    for message in named:
        # the role already identifies the speaker
        if message.role != "assistant" or message.participant != request.participant:
            problem = "this API has no field for participant names; they were left out (see names_in_text)"
            notes.add(message.where, problem)
    return [msgspec.structs.replace(message, participant=None) for message in messages]


def _fitted(messages: Sequence[Spoken], named: Iterable[Spoken], notes: Notes) -> list[Spoken]:
    """Rewrite names to match the field's pattern, keeping them distinct."""
    names = dict.fromkeys(message.participant or "" for message in named)
    fitted = {name: name for name in names if len(name) <= MAX_NAME and not _UNFIT.search(name)}
    for name in names:
        if name not in fitted:
            fitted[name] = _fit(name, set(fitted.values()))
    for message in messages:
        name = message.participant or ""
        if fitted.get(name, name) != name:
            notes.add(message.where, f"the participant {name!r} is sent as {fitted[name]!r} to fit the API")
    return [msgspec.structs.replace(m, participant=fitted.get(m.participant or "")) for m in messages]


def _fit(name: str, taken: set[str]) -> str:
    stem = _UNFIT.sub("_", name.strip())[:MAX_NAME] or "_"
    fit, n = stem, 2
    while fit in taken:
        mark = f"_{n}"
        fit, n = stem[: MAX_NAME - len(mark)] + mark, n + 1
    return fit


def _in_text(messages: Sequence[Spoken], request: Generate) -> list[Spoken]:
    """Write the names before the texts.

    The model's own messages get no name, because the model would imitate it, unless another speaker of the same role is
    adjacent.
    """
    return [
        _with_name(message, _name(message, request))
        if _is_named(message, request) or any(_differ(message, near, request) for near in _neighbours(messages, i))
        else msgspec.structs.replace(message, participant=None)
        for i, message in enumerate(messages)
    ]


def _neighbours(messages: Sequence[Spoken], i: int) -> list[Spoken]:
    """Return the adjacent messages of the same role."""
    return [messages[j] for j in (i - 1, i + 1) if 0 <= j < len(messages) and messages[j].role == messages[i].role]


def _differ(one: Spoken, other: Spoken, request: Generate) -> bool:
    return one.role in ("user", "assistant") and _name(one, request) != _name(other, request)


def _is_named(message: Spoken, request: Generate) -> bool:
    name = (message.participant or "").strip()
    own = message.role == "assistant" and message.participant == request.participant
    return bool(name) and message.role in ("user", "assistant") and not own


def _name(message: Spoken, request: Generate) -> str:
    if name := (message.participant or "").strip():
        return name
    return USER if message.role == "user" else request.participant or ASSISTANT


def _with_name(message: Spoken, name: str) -> Spoken:
    """Put the name before the first text, or before everything if the message starts with another part."""
    [first, *more] = message.parts
    parts: list[ContentPart] = [TextPart(text=f"{name}:"), *message.parts]
    if isinstance(first, TextPart):
        parts = [msgspec.structs.replace(first, text=f"{name}: {first.text}"), *more]
    return msgspec.structs.replace(message, parts=parts, participant=None)

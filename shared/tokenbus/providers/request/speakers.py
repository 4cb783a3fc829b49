"""Who says what, in mode chat: names of participants go into the API's field, or into the text, or are left out with a
note. Neighbouring messages of one role may become one on the way, so two speakers are never told apart by their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from tokenbus.events.requests import ContentPart, Generate, TextPart
from tokenbus.providers.request.notes import Notes
from tokenbus.providers.request.turns import Spoken, Takes

MAX_NAME = 64
"""Characters of a name in Chat Completions."""
USER, ASSISTANT = "User", "Assistant"
"""Names in the text of speakers who have none, beside others of the same role."""
_UNFIT = re.compile(r"[\s<|\\/>]+")


def with_speakers(said: list[Spoken], request: Generate, takes: Takes, notes: Notes) -> list[Spoken]:
    """The messages as the API takes them: each ``participant`` is what goes into its field."""
    named = [message for message in said if message.participant and message.participant.strip()]
    if not named or takes.written:
        return said
    if request.names_in_text:
        return _in_text(said, request)
    if takes.names:
        return _fitted(said, named, notes)
    for message in named:
        if message.role != "assistant" or message.participant != request.participant:  # whose role says who it is
            problem = "this API has no place for the names of participants; they were left out (see names_in_text)"
            notes.add(message.where, problem)
    return [msgspec.structs.replace(message, participant=None) for message in said]


def _fitted(said: Sequence[Spoken], named: Iterable[Spoken], notes: Notes) -> list[Spoken]:
    """With names that fit the field's pattern, each speaker's another one."""
    names = dict.fromkeys(message.participant or "" for message in named)
    fitted = {name: name for name in names if len(name) <= MAX_NAME and not _UNFIT.search(name)}
    for name in names:
        if name not in fitted:
            fitted[name] = _fit(name, set(fitted.values()))
    for message in said:
        name = message.participant or ""
        if fitted.get(name, name) != name:
            notes.add(message.where, f"the participant {name!r} goes as {fitted[name]!r}, which the API takes")
    return [msgspec.structs.replace(m, participant=fitted.get(m.participant or "")) for m in said]


def _fit(name: str, taken: set[str]) -> str:
    stem = _UNFIT.sub("_", name.strip())[:MAX_NAME] or "_"
    fit, n = stem, 2
    while fit in taken:
        mark = f"_{n}"
        fit, n = stem[: MAX_NAME - len(mark)] + mark, n + 1
    return fit


def _in_text(said: Sequence[Spoken], request: Generate) -> list[Spoken]:
    """With the names in front of the texts. The model's own messages have none, for it would write it too, but where
    another speaker of its role stands beside."""
    return [
        _led(message, _name(message, request))
        if _is_named(message, request) or any(_differ(message, beside, request) for beside in _beside(said, i))
        else msgspec.structs.replace(message, participant=None)
        for i, message in enumerate(said)
    ]


def _beside(said: Sequence[Spoken], i: int) -> list[Spoken]:
    """The messages next to this one that have its role."""
    return [said[j] for j in (i - 1, i + 1) if 0 <= j < len(said) and said[j].role == said[i].role]


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


def _led(message: Spoken, name: str) -> Spoken:
    """The message with the name before its first text, or before all where it begins with something else."""
    [first, *more] = message.parts
    parts: list[ContentPart] = [TextPart(text=f"{name}:"), *message.parts]
    if isinstance(first, TextPart):
        parts = [msgspec.structs.replace(first, text=f"{name}: {first.text}"), *more]
    return msgspec.structs.replace(message, parts=parts, participant=None)

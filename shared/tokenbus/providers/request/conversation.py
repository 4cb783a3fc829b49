"""Prepares a conversation for a provider request: validates it, normalizes it, repairs it and adapts it to the API.

Histories come from clients that trim them, from runs that stopped inside a turn and from other providers. This module
alone repairs, converts or drops what does not fit, with a note for each change. It never raises an error that asks for
data the client never received.

::

    messages ─> checked ─> speakers ─> foreign content ─> calls and results ─> Spoken
                media types  names       thinking, images    ids, order
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from tokenbus.blobs import plain_media_type
from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.events.quirks import ApiName
from tokenbus.events.run_messages import is_json
from tokenbus.providers.request.foreign_content import Adapted, item_owner, without_trailing_thinking
from tokenbus.providers.request.tool_results import NO_RESULT, Calls
from tokenbus.providers.request.turns import Notes, PartOption, Role, Spoken, Takes

P = TypeVar("P", bound=requests.ContentPart)

__all__ = ["NO_RESULT", "Spoken", "Takes", "conversation", "own_extra", "raw_json"]

_ALLOWED: dict[Role, tuple[type[msgspec.Struct], ...]] = {
    "system": (requests.TextPart,),
    "user": (requests.TextPart, requests.ImagePart, requests.DocumentPart, requests.ToolResultPart, requests.ExtraPart),
    "assistant": (
        requests.TextPart,
        requests.ThinkingPart,
        requests.ImagePart,
        requests.ToolCallPart,
        requests.ExtraPart,
    ),
    "tool": (requests.ToolResultPart,),
}


_ANYTHING = Takes()


def conversation(
    request: requests.Generate, history: list[requests.Message], takes: Takes = _ANYTHING
) -> tuple[list[Spoken], tuple[str, ...]]:
    """Return the request's messages followed by the run's own, in a form the API accepts, and a sentence for each
    change.

    Does not include `request.system`. Raises RequestInvalid for a part that its role cannot contain and for media still
    in the blob store.
    """
    notes = Notes()
    messages = [_checked(m, f"messages[{i}]", takes, notes) for i, m in enumerate(request.messages)]
    messages += [_checked(m, f"history[{i}]", takes, notes) for i, m in enumerate(history)]
    messages = with_speakers(messages, request, takes, notes)
    calls = Calls(notes, unique_ids=takes.unique_ids)
    for message in messages:
        if message.role == "assistant" and not takes.written:
            adapted = Adapted(message, request, takes, notes)
            shown = Spoken("user", adapted.images, message.where) if adapted.images else None
            calls.add(msgspec.structs.replace(message, parts=adapted.parts), shown)
        else:
            calls.add(message)
    spoken = calls.spoken if takes.written else without_trailing_thinking(calls.spoken, notes)
    if not spoken:
        raise RequestInvalid("messages", "the conversation is empty")
    return spoken, notes.sentences


def own_extra(part: requests.ExtraPart, api: ApiName, where: str) -> msgspec.Raw | None:
    """A provider-specific item, sent unchanged; None if it belongs to another API. Raises RequestInvalid if it is not
    JSON.
    """
    if item_owner(part) not in (None, api):
        return None
    return raw_json(part.json, where)


def raw_json(text: str, where: str) -> msgspec.Raw:
    """Validate JSON text. Raises RequestInvalid."""
    if not is_json(text):
        raise RequestInvalid(where, "not valid JSON")
    return msgspec.Raw(text)


def _checked(message: requests.Message, where: str, takes: Takes, notes: Notes) -> Spoken:
    content = [requests.TextPart(text=message.content)] if isinstance(message.content, str) else message.content
    allowed = _ALLOWED[message.role]
    parts: list[requests.ContentPart] = []
    for i, part in enumerate(content):
        at = where if isinstance(message.content, str) else f"{where}.content[{i}]"
        if not isinstance(part, allowed):
            kinds = ", ".join(str(kind.__struct_config__.tag) for kind in allowed)
            raise RequestInvalid(at, f"a message of role {message.role} may contain only: {kinds}")
        if not (isinstance(part, requests.TextPart) and not part.text):
            _note_options(part, at, takes, notes)
            if isinstance(part, requests.ToolCallPart) and part.free_text and not takes.free_text_calls:
                arguments = msgspec.json.encode({"input": part.arguments}).decode()
                part = msgspec.structs.replace(part, arguments=arguments, free_text=False)  # noqa: PLW2901
            parts.append(_with_plain_types(part, at, notes))
    if takes.written and message.extra:
        notes.add(where, "extra has no effect in mode prefill")
    return Spoken(message.role, parts, where, message.participant, (message.extra or {}).get(takes.api or "", {}))


def _note_options(part: requests.ContentPart, at: str, takes: Takes, notes: Notes) -> None:
    """Note each option of the part that the API does not have."""
    if isinstance(part, requests.ToolResultPart) and not isinstance(part.content, str):
        for i, inner in enumerate(part.content):
            _note_options(inner, f"{at}.content[{i}]", takes, notes)
    if takes.written:  # the builder writes media itself, and `transcript` notes what a text cannot hold
        if isinstance(part, requests.TextPart | requests.ToolCallPart | requests.ToolResultPart) and part.extra:
            notes.add(at, "extra has no effect in mode prefill")
        return
    used: dict[PartOption, bool] = {"lifetime": isinstance(getattr(part, "cache", False), str)}
    if isinstance(part, requests.DocumentPart):
        used |= {"title": bool(part.title), "citations": bool(part.citations), "context": bool(part.context)}
    if isinstance(part, requests.ImagePart):
        used["detail"] = part.detail is not None
    for option, given in used.items():
        if given and option not in takes.part_options:
            name = "the time in cache" if option == "lifetime" else option
            notes.add(at, f"{name} has no effect: this API has no such option")


def _with_plain_types(part: requests.ContentPart, at: str, notes: Notes) -> requests.ContentPart:
    """Rewrite media types to the one spelling that all APIs accept. Raises RequestInvalid for media still in the blob
    store.
    """
    if isinstance(part, requests.ToolResultPart) and not isinstance(part.content, str):
        inside = [_typed(inner, f"{at}.content[{i}]", notes) for i, inner in enumerate(part.content)]
        return msgspec.structs.replace(part, content=inside)
    return _typed(part, at, notes)


def _typed(part: P, at: str, notes: Notes) -> P:
    if not isinstance(part, requests.ImagePart | requests.DocumentPart):
        return part
    source = part.source
    if isinstance(source, requests.BlobSource):
        raise RequestInvalid(at, "media from the blob store was not loaded")
    if isinstance(source, requests.UrlSource) or source.media_type is None:
        return part
    plain = plain_media_type(source.media_type)
    if plain == source.media_type:
        return part
    notes.add(f"{at}.source.media_type", f"{source.media_type!r} is sent as {plain!r}")
    return msgspec.structs.replace(part, source=msgspec.structs.replace(source, media_type=plain))


MAX_NAME = 64
"""Maximum characters of a name in Chat Completions."""
USER, ASSISTANT = "User", "Assistant"
"""Names written for speakers without one, next to others of the same role."""
_UNFIT = re.compile(r"[\s<|\\/>]+")


def with_speakers(messages: list[Spoken], request: requests.Generate, takes: Takes, notes: Notes) -> list[Spoken]:
    """Return the messages with each ``participant`` set to the value of the API's name field.

    Adjacent messages of one role may be merged later, so position never identifies a speaker.
    """
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


def _in_text(messages: Sequence[Spoken], request: requests.Generate) -> list[Spoken]:
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


def _differ(one: Spoken, other: Spoken, request: requests.Generate) -> bool:
    return one.role in ("user", "assistant") and _name(one, request) != _name(other, request)


def _is_named(message: Spoken, request: requests.Generate) -> bool:
    name = (message.participant or "").strip()
    own = message.role == "assistant" and message.participant == request.participant
    return bool(name) and message.role in ("user", "assistant") and not own


def _name(message: Spoken, request: requests.Generate) -> str:
    if name := (message.participant or "").strip():
        return name
    return USER if message.role == "user" else request.participant or ASSISTANT


def _with_name(message: Spoken, name: str) -> Spoken:
    """Put the name before the first text, or before everything if the message starts with another part."""
    [first, *more] = message.parts
    parts: list[requests.ContentPart] = [requests.TextPart(text=f"{name}:"), *message.parts]
    if isinstance(first, requests.TextPart):
        parts = [msgspec.structs.replace(first, text=f"{name}: {first.text}"), *more]
    return msgspec.structs.replace(message, parts=parts, participant=None)

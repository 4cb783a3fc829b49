"""The conversation as a provider request needs it: checked, in one form, every tool call with its result.

All provider APIs refuse a call without a result and a result without a call, and want the result right after the
call. Histories break these rules when a client trims them, stops a run inside a turn, or switches providers; here,
and only here, that is mended, with a note for each.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import (
    BlobSource,
    ContentPart,
    DocumentPart,
    ExtraPart,
    Generate,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.events.vendor import ApiName
from tokenbus.providers.json_reading import is_json

Role = Literal["system", "user", "assistant", "tool"]

NO_RESULT = "No result: the call was never answered."
"""What the model reads as the error result of an orphan call."""

_ALLOWED: dict[Role, tuple[type[msgspec.Struct], ...]] = {
    "system": (TextPart,),
    "user": (TextPart, ImagePart, DocumentPart, ToolResultPart, ExtraPart),
    "assistant": (TextPart, ThinkingPart, ImagePart, ToolCallPart, ExtraPart),
    "tool": (ToolResultPart,),
}


class Spoken(msgspec.Struct, frozen=True):
    """One message. Tool results stand alone in messages of role ``tool``, each right after its calls.

    No part is an empty text, and no message is without parts.
    """

    role: Role
    parts: list[ContentPart]
    where: str
    """Its place in the request, for errors."""
    participant: str | None = None


class _Answer(msgspec.Struct):
    """A call, and its result once it was found."""

    call: ToolCallPart
    result: ToolResultPart | None = None


class _Answers(msgspec.Struct):
    """The place right after an assistant's message where the results of its calls belong."""

    answers: list[_Answer]
    where: str

    def take(self, result: ToolResultPart) -> bool:
        """Whether the result was that of a call which still had none."""
        for answer in self.answers:
            if answer.result is None and answer.call.tool_id == result.tool_id:
                answer.result = result
                return True
        return False

    def spoken(self, notes: list[str]) -> Spoken:
        parts: list[ContentPart] = []
        for answer in self.answers:
            if answer.result is None:
                call = answer.call
                notes.append(f"{self.where}: the call {call.tool_id} of {call.tool_name} has no result; one was put in")
                parts.append(
                    ToolResultPart(tool_id=call.tool_id, tool_name=call.tool_name, content=NO_RESULT, is_error=True)
                )
            else:
                parts.append(answer.result)
        return Spoken("tool", parts, self.where)


def conversation(
    request: Generate, history: list[Message], *, plain_thinking: bool = False, model_images: bool = False
) -> tuple[list[Spoken], tuple[str, ...]]:
    """The request's messages and then the run's own, and what was mended or converted, a sentence each.

    `request.system` is not among them. ``plain_thinking``: the provider takes thinking without a signature back.
    ``model_images``: it takes images of the model's own back; if not, they are left out, with a note. Raises
    RequestInvalid for a part that its role cannot have, for media still in the blob store, and for unsigned thinking of
    the request that is neither taken back nor to be converted.
    """
    notes: list[str] = []
    said = [_checked(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
    if not plain_thinking:
        said = [_signed(message, request, notes) for message in said]
    said += [_checked(m, f"history[{i}]") for i, m in enumerate(history)]
    if not model_images:
        said = [_unseen(message, notes) for message in said]
    spoken, mended = _mended(said)
    return spoken, (*notes, *mended)


def _signed(message: Spoken, request: Generate, notes: list[str]) -> Spoken:
    """The message without thinking that has nothing by which its provider would know it again."""
    parts: list[ContentPart] = []
    for part in message.parts:
        if not isinstance(part, ThinkingPart) or part.signature or part.opaque:
            parts.append(part)
        elif part.text and request.convert_unsigned_thinking_to_text:
            notes.append(f"{message.where}: thinking without a signature was turned into text")
            parts.append(TextPart(text=f"<thinking>{part.text}</thinking>"))
        elif part.text:
            problem = (
                "this provider takes no thinking back without the signature that came with it: send that, leave the "
                "thinking out, or set convert_unsigned_thinking_to_text"
            )
            raise RequestInvalid(message.where, problem)
    return Spoken(message.role, parts, message.where, message.participant)


def _unseen(message: Spoken, notes: list[str]) -> Spoken:
    """The message without images that the model made."""
    if message.role != "assistant" or not any(isinstance(part, ImagePart) for part in message.parts):
        return message
    notes.append(f"{message.where}: this provider takes no images of the model's own back; they were left out")
    parts: list[ContentPart] = [part for part in message.parts if not isinstance(part, ImagePart)]
    return Spoken(message.role, parts, message.where, message.participant)


def own_extra(part: ExtraPart, api: ApiName, where: str) -> msgspec.Raw | None:
    """A provider's own item, to be sent as it is; None where it is another API's.

    Decoders name what they cannot name otherwise ``<api>.<type>``. A name without an API in front was written by the
    client for this request. Raises RequestInvalid where it is no JSON.
    """
    owner, dot, _ = part.name.partition(".")
    if dot and owner != api and owner in get_args(ApiName):
        return None
    return raw_json(part.json, where)


def raw_json(text: str, where: str) -> msgspec.Raw:
    """JSON text, checked. Raises RequestInvalid."""
    if not is_json(text):
        raise RequestInvalid(where, "it is no JSON")
    return msgspec.Raw(text)


def _checked(message: Message, where: str) -> Spoken:
    content = [TextPart(text=message.content)] if isinstance(message.content, str) else message.content
    allowed = _ALLOWED[message.role]
    parts: list[ContentPart] = []
    for i, part in enumerate(content):
        at = where if isinstance(message.content, str) else f"{where}.content[{i}]"
        if not isinstance(part, allowed):
            kinds = ", ".join(str(kind.__struct_config__.tag) for kind in allowed)
            raise RequestInvalid(at, f"a message of role {message.role} holds only: {kinds}")
        media = part.content if isinstance(part, ToolResultPart) else [part]
        if any(isinstance(m, ImagePart | DocumentPart) and isinstance(m.source, BlobSource) for m in media):
            raise RequestInvalid(at, "media from the blob store was not loaded")
        if not (isinstance(part, TextPart) and not part.text):
            parts.append(part)
    return Spoken(message.role, parts, where, message.participant)


def _mended(said: list[Spoken]) -> tuple[list[Spoken], tuple[str, ...]]:
    notes: list[str] = []
    out: list[Spoken | _Answers] = []
    waiting: list[_Answers] = []
    for message in said:
        rest: list[ContentPart] = []
        for part in message.parts:
            if isinstance(part, ToolResultPart):
                _place(part, message.where, waiting, out, notes)
            else:
                rest.append(part)
        if not rest:
            continue
        out.append(Spoken(message.role, rest, message.where, message.participant))
        calls = [_Answer(part) for part in rest if isinstance(part, ToolCallPart)]
        if calls:
            answers = _Answers(calls, message.where)
            waiting.append(answers)
            out.append(answers)
    if not out:
        raise RequestInvalid("messages", "they hold nothing")
    return [m.spoken(notes) if isinstance(m, _Answers) else m for m in out], tuple(notes)


def _place(
    result: ToolResultPart, where: str, waiting: list[_Answers], out: list[Spoken | _Answers], notes: list[str]
) -> None:
    """Put a result to its call: the latest open one with its id, for ids repeat across turns."""
    for answers in reversed(waiting):
        if answers.take(result):
            if answers is not out[-1]:
                notes.append(f"{where}: the result of call {result.tool_id} was moved to its call")
            if all(answer.result for answer in answers.answers):
                waiting.remove(answers)
            return
    notes.append(f"{where}: the result of call {result.tool_id} has no call before it and was left out")

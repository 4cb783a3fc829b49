"""Writes a conversation as one text for the model to continue (prefill mode). `tokenbus.core.prefill` parses it.

One line ``Name: text`` per message, or the layout in the request's `prefill`; then the model's ``Name:``, plus ``
<thinking>`` if thinking is on. If the last message is the model's own, the model continues it. The model's output of
this run is kept verbatim, with results right after the closing tag of their calls. docs/guides/prefill.md has the
grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.providers.request.build import schema_of
from tokenbus.providers.request.conversation import Spoken, Takes, conversation
from tokenbus.providers.request.participants import CALLS_CLOSES, Names, between, options_of

OPENING = "Continue the conversation."
"""The user message for APIs that require one before the text, if there is no media to put there."""

Media = requests.ImagePart | requests.DocumentPart
_object = msgspec.json.Decoder(dict[str, object])


class Transcript(msgspec.Struct, frozen=True):
    """The text and its media, in order. Adjacent texts are merged; the last part is non-empty text."""

    parts: list[str | Media]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text after the last media, which the model continues."""
        assert isinstance(self.parts[-1], str)
        return self.parts[-1]

    @property
    def before(self) -> list[str | Media]:
        """Everything up to the last media."""
        return self.parts[:-1]


class _Writer:
    """Collects text and media, merging adjacent texts."""

    def __init__(self) -> None:
        self.parts: list[str | Media] = []

    def add(self, *items: str | Media) -> None:
        for item in items:
            if isinstance(item, str) and self.parts and isinstance(self.parts[-1], str):
                self.parts[-1] += item
            elif item:
                self.parts.append(item)


def transcribe(request: requests.Generate, history: list[requests.Message], token: str = "") -> Transcript:
    """Write the conversation and the output of the run's earlier turns. ``token`` ends each message. Raises
    RequestInvalid.
    """
    options = options_of(request)
    if (request.participant or "") in options.unnamed and not token and not (options.delimiter or "").strip():
        problem = "the model's own name can be omitted only with end_of_turn or a visible delimiter"
        raise RequestInvalid("prefill.unnamed", problem)
    spoken, notes = conversation(request, [], Takes(written=True))
    notes += tuple(_without_effect(request))
    writer = _Writer()
    separator = between(request, token)
    names, names_once = Names(request), options_of(request).names_once
    before = last = ""
    for message in spoken:
        if message.role != "tool":
            writer.add(before)
            name = names.of(message.participant, message.role)
            if name and not (names_once and name == last):
                writer.add(f"{name}: ")
            last = name
        notes += _write(message, writer)
        before = separator
    if not continues_own(request):
        writer.add(before, _cue(request))
    for message in history:
        if isinstance(message.content, str):
            writer.add(message.content)
        else:
            _write_results([part for part in message.content if isinstance(part, requests.ToolResultPart)], writer)
    if not writer.parts or not isinstance(writer.parts[-1], str):
        raise RequestInvalid("messages", "there is no text to continue after the last image or document")
    return Transcript(writer.parts, notes)


def opening_of(request: requests.Generate, transcript: Transcript) -> Spoken:
    """The user message before the text to continue; it holds all media."""
    first = options_of(request).first_user_message
    blocks = [requests.TextPart(text=part) if isinstance(part, str) else part for part in transcript.before]
    if first is None:
        return Spoken("user", [*blocks] or [requests.TextPart(text=OPENING)], "messages")
    return Spoken("user", [requests.TextPart(text=first), *blocks], "messages")


def follows_a_name(request: requests.Generate) -> bool:
    """Whether the model's text begins right after its name and the space that follows."""
    return not continues_own(request) and bool(Names(request).of(request.participant, "assistant"))


def _cue(request: requests.Generate) -> str:
    """The cue for the model: its name, and the thinking tag if thinking is on."""
    name = Names(request).of(request.participant, "assistant")
    thinking = "<thinking>" if opens_thinking(request) else ""
    return " ".join(part for part in (f"{name}:" if name else "", thinking) if part)


def continues_own(request: requests.Generate) -> bool:
    """Whether the last message is the model's own or holds the results of its calls."""
    last = request.messages[-1]
    if (
        isinstance(last.content, list)
        and last.content
        and all(isinstance(p, requests.ToolResultPart) for p in last.content)
    ):
        return True
    return last.role == "assistant" and (last.participant or "").strip() in ("", request.participant)


def opens_thinking(request: requests.Generate) -> bool:
    """Whether the text ends inside a thinking block that the model should continue."""
    return bool(request.thinking and request.thinking.wanted) and not continues_own(request)


def system_text(request: requests.Generate) -> str:
    """The system text, plus the tool definitions and the call syntax."""
    system = request.system or ""
    texts = [system if isinstance(system, str) else "\n\n".join(part.text for part in system), _tools(request.tools)]
    return "\n\n".join(text for text in texts if text.strip())


def _tools(tools: list[requests.Tool]) -> str:
    if not tools:
        return ""
    lines = [
        msgspec.json.encode(
            {"name": tool.name, "description": tool.description or "", "parameters": schema_of(tool.parameters)}
        ).decode()
        for tool in tools
    ]
    return (
        "These functions can be called, each described by its name and the JSON schema of its parameters:\n"
        "<functions>\n" + "\n".join(lines) + "\n</functions>\n"
        "A call looks like this, and several may stand in one block; text is written as it is, any other value as "
        "JSON:\n"
        '<function_calls>\n<invoke name="FUNCTION">\n<parameter name="PARAMETER">VALUE</parameter>\n</invoke>\n'
        "</function_calls>\n"
        "The results follow right after the block, in function_results; they are never written by you."
    )


def _write(message: Spoken, writer: _Writer) -> tuple[str, ...]:
    """Write one message. Return a note for each part that cannot be expressed as text."""
    calls = [part for part in message.parts if isinstance(part, requests.ToolCallPart)]
    notes: tuple[str, ...] = tuple(f"{message.where}: {left}" for left in _left_out(message.parts))
    for part in message.parts:
        match part:
            case requests.TextPart():
                writer.add(part.text)
            case requests.ThinkingPart():
                writer.add(f"<thinking>{part.text}</thinking>" if part.text else "")
            case requests.ImagePart() | requests.DocumentPart():
                writer.add(part)
            case requests.ExtraPart():
                notes += (f"{message.where}: {part.name} cannot be written as text and was left out",)
            case requests.ToolCallPart() | requests.ToolResultPart():
                pass
    if calls:
        writer.add("\n<function_calls>\n", *(_invoke(part) for part in calls), CALLS_CLOSES[0])
    _write_results([part for part in message.parts if isinstance(part, requests.ToolResultPart)], writer)
    return notes


def _left_out(parts: Sequence[requests.ContentPart]) -> Iterator[str]:
    """What the text cannot hold of these parts, each once."""
    if any(isinstance(part, requests.TextPart | requests.ToolResultPart) and part.cache for part in parts):
        yield "marks for the cache have no effect in mode prefill"
    if any(isinstance(part, requests.TextPart) and "citations" in (part.opaque or {}) for part in parts):
        yield "citations cannot be written as text and were left out"
    thoughts = [part for part in parts if isinstance(part, requests.ThinkingPart)]
    if any(not part.text for part in thoughts):
        yield "thinking without text (redacted or encrypted) cannot be written as text and was left out"
    if any(part.text and (part.signature or part.opaque) for part in thoughts):
        yield "the signature of thinking was left out: the text has the thinking alone"


def _without_effect(request: requests.Generate) -> Iterator[str]:
    """Options that mode prefill does not send."""
    for i, tool in enumerate(request.tools):
        if tool.extra:
            yield f"tools[{i}]: extra has no effect in mode prefill"
    if isinstance(request.system, list) and any(part.cache for part in request.system):
        yield "system: marks for the cache have no effect in mode prefill"
    for name in ("effort", "budget_tokens"):
        if request.thinking and request.thinking.wanted and getattr(request.thinking, name):
            yield f"thinking.{name} has no effect in mode prefill: the model writes its thinking into the text"


def _invoke(part: requests.ToolCallPart) -> str:
    try:
        arguments = _object.decode(part.arguments or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        arguments: dict[str, object] = {"invalid_arguments": part.arguments}
    lines = [f'<invoke name="{_escaped(part.tool_name)}">']
    for name, value in arguments.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        lines.append(f'<parameter name="{_escaped(name)}">{text}</parameter>')
    return "\n".join([*lines, "</invoke>\n"])


def _write_results(parts: list[requests.ToolResultPart], writer: _Writer) -> None:
    if not parts:
        return
    writer.add("<function_results>\n")
    for part in parts:
        tag = "error" if part.is_error else "result"
        writer.add(f'<{tag} tool_use_id="{_escaped(part.tool_id)}">')
        for inner in [requests.TextPart(text=part.content)] if isinstance(part.content, str) else part.content:
            writer.add(_escaped(inner.text) if isinstance(inner, requests.TextPart) else inner)
        writer.add(f"</{tag}>\n")
    writer.add("</function_results>")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")

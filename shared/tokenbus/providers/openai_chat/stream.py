"""The answer of Chat Completions and of those who speak it, streamed or whole, as normalised events.

What providers.md ("OpenAI Chat Completions") says of real streams holds here. Choices of our own:

- Text and thinking follow each other: the one ends where the other begins, where a tool call begins, and at
  `finish_reason`. Content after that is a new block.
- A tool call ends with the response, for nothing in between says that it is complete: not at all if the response was
  cut by length, by a filter or by an error.
- `[DONE]` ends the response; without it the end of the body does, if a `finish_reason` came. `[DONE]` without any
  `finish_reason` is a sound end with finish `unknown`, so that no call of it runs.
- Only choice 0 is the answer; others are shown as `Extra`.
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    FinishReason,
    Image,
    Normalized,
    Opaque,
    OpenKind,
    RefusalDelta,
    Start,
    Terminal,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStart,
    UsageSeen,
)
from tokenbus.events.usage import Usage
from tokenbus.providers.decoding import ResponseDecoder, finish_of
from tokenbus.providers.failures import provider_failure
from tokenbus.providers.json_reading import is_null, read, text_of
from tokenbus.providers.openai_chat import reasoning, wire
from tokenbus.providers.openai_chat.calls import CallTable
from tokenbus.providers.sse import SseEvent
from tokenbus.providers.usage_counts import count, latest

FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "model_length": "length",  # Mistral: the context is full
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "content_filter",
    "error": "error",  # OpenRouter
}
_BROKEN_OFF: tuple[FinishReason, ...] = ("length", "content_filter", "error")


class ChatDecoder(ResponseDecoder, kw_only=True):
    """One response of Chat Completions; see `tokenbus.providers.api.Decoder`."""

    reasoning_fields: tuple[str, ...]
    """Where the vendor may have its reasoning."""
    reasoning_field: str = ""
    """The first of them that held text: often several hold the same, so only one is read."""
    started: bool = False
    next_ordinal: int = 0
    open_kind: OpenKind | None = None
    open_ordinal: int = -1
    """The open text or thinking block."""
    last_thinking: int = -1
    details: list[reasoning.Detail] = msgspec.field(default_factory=list[reasoning.Detail])
    table: CallTable = msgspec.field(default_factory=CallTable)
    finish: str | None = None
    stop_string: str = ""
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return self._finish(out) if self.started else Cut("[DONE] came before any content")
        chunk = read(wire.chunk_decoder(self.reasoning_fields), data, "chunk")
        if chunk.error or chunk.object == "error":
            return Failed(provider_failure(read(wire.anything, data, "chunk")))
        usage = chunk.usage or (chunk.x_groq and chunk.x_groq.usage)
        if not self.started and (chunk.model or chunk.choices or usage):
            self.started = True
            out.append(Start(chunk.model or "", chunk.id or ""))
        others: list[int] = []
        for place, choice in enumerate(chunk.choices or ()):
            if choice.index:
                others.append(place)
            else:
                self._choice(choice, out)
        if others:
            raw = read(wire.raw_choices, data, "chunk").choices or []
            out += [Extra("openai-chat.choice", text_of(raw[place])) for place in others]
        if usage:
            self._count(usage, out)
        elif chunk.choices is msgspec.UNSET and self.started:
            out.append(Extra("openai-chat.event", data.decode()))
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        if self.finish is not None:
            return self._finish(out)
        return Cut("the stream ended before finish_reason and [DONE]" if self.started else "the body held no answer")

    # --- content --------------------------------------------------------------------------------------------

    def _choice(self, choice: wire.Choice, out: list[Normalized]) -> None:
        delta = choice.delta or choice.message
        if delta is not None:
            self._reasoning(delta, out)
            if isinstance(delta.content, str):
                if delta.content:
                    out.append(TextDelta(self._block("text", out), delta.content))
            elif delta.content:
                self._parts(delta.content, out)
            if delta.refusal:
                out.append(RefusalDelta(self._block("text", out), delta.refusal))
            for call in delta.tool_calls or ():
                self._call(call, out)
            if delta.function_call:
                self._call(wire.CallDelta(index=0, function=delta.function_call), out)
            if not (delta.annotations is delta.executed_tools is delta.audio is delta.images is wire.NOTHING):
                self._further(delta, out)
        elif choice.text:
            out.append(TextDelta(self._block("text", out), choice.text))
        if choice.finish_reason:
            self.finish = choice.finish_reason
            stop = choice.stop_reason or choice.matched_stop
            self.stop_string = stop if isinstance(stop, str) else ""
            self._shut(out)

    def _reasoning(self, delta: wire.Delta, out: list[Normalized]) -> None:
        for field in (self.reasoning_field,) if self.reasoning_field else self.reasoning_fields:
            if value := getattr(delta, field, None):
                text = value if isinstance(value, str) else reasoning.text_of(reasoning.pieces_of(value))
                if text:
                    self.reasoning_field = field
                    out.append(ThinkingDelta(self._block("thinking", out), text))
                    break
        if delta.reasoning_details:
            for piece in reasoning.pieces_of(delta.reasoning_details):
                self._hold(reasoning.add(self.details, piece))

    def _parts(self, parts: list[msgspec.Raw], out: list[Normalized]) -> None:
        """Content that is a list (Mistral)."""
        for raw in parts:
            part = read(wire.content_part, bytes(raw), "content part")
            if part.type == "text":
                if part.text:
                    out.append(TextDelta(self._block("text", out), part.text))
            elif part.type == "thinking":
                said = part.thinking
                text = said if isinstance(said, str) else "".join(inner.text or "" for inner in said or ())
                if text:
                    out.append(ThinkingDelta(self._block("thinking", out), text))
            else:
                out.append(Extra("openai-chat.content_part", text_of(raw), self._open_or_none()))

    def _call(self, delta: wire.CallDelta, out: list[Normalized]) -> None:
        function = delta.function or wire.Function()
        said = function.arguments
        arguments = msgspec.json.encode(said).decode() if isinstance(said, dict) else said or ""
        if not (delta.id or function.name or arguments):
            return
        call = self.table.find(delta, function.name or "")
        if not is_null(delta.extra_content):
            call.extra_content = text_of(delta.extra_content)
            self._hold(len(call.extra_content))
        if call.ordinal < 0 and call.name:
            self._shut(out)
            call.ordinal = self._take_ordinal()
            tool_id = call.tool_id or f"call_{call.ordinal}"
            out.append(ToolCallStart(call.ordinal, tool_id, call.name, derived=not call.tool_id))
            if held := "".join(call.pieces):
                out.append(ToolCallDelta(call.ordinal, held))
                call.pieces = []
        if call.ordinal < 0:
            self._hold(len(arguments) + 64)
            call.pieces.append(arguments)
        elif arguments:
            out.append(ToolCallDelta(call.ordinal, arguments))

    def _further(self, delta: wire.Delta, out: list[Normalized]) -> None:
        """What an answer may have beside text and calls."""
        for name in ("annotations", "executed_tools", "audio"):
            value: msgspec.Raw = getattr(delta, name)
            if not is_null(value) and bytes(value) != b"[]":
                out.append(Extra(f"openai-chat.{name}", text_of(value), self._open_or_none()))
        if not is_null(delta.images):
            for raw in read(wire.raw_items, bytes(delta.images), "images"):
                self._image(raw, out)

    def _image(self, raw: msgspec.Raw, out: list[Normalized]) -> None:
        """An image of the answer, whole, as a data URL."""
        item = read(wire.image_item, bytes(raw), "image")
        head, inline, data = (item.image_url.url if item.image_url else "").partition(";base64,")
        if not (inline and head.startswith("data:")):
            out.append(Extra("openai-chat.image", text_of(raw)))
            return
        self._shut(out)
        ordinal = self._take_ordinal()
        image = Image(ordinal, head.removeprefix("data:"), data, final=True)
        out += [BlockStart(ordinal, "image"), image, BlockStop(ordinal)]

    # --- blocks and the end ---------------------------------------------------------------------------------

    def _block(self, kind: OpenKind, out: list[Normalized]) -> int:
        """The open block of this kind; what is open of another ends."""
        if self.open_kind != kind:
            self._shut(out)
            self.open_kind, self.open_ordinal = kind, self._take_ordinal()
            if kind == "thinking":
                self.last_thinking = self.open_ordinal
            out.append(BlockStart(self.open_ordinal, kind))
        return self.open_ordinal

    def _shut(self, out: list[Normalized]) -> None:
        if self.open_kind is not None:
            out.append(BlockStop(self.open_ordinal))
            self.open_kind, self.open_ordinal = None, -1

    def _open_or_none(self) -> int | None:
        return self.open_ordinal if self.open_kind else None

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1

    def _count(self, usage: dict[str, object], out: list[Normalized]) -> None:
        if (raw := latest(self.usage, usage)) != self.usage:
            self.usage = raw
            out.append(UsageSeen(usage_of(raw)))

    def _finish(self, out: list[Normalized]) -> Done:
        self._shut(out)
        if back := reasoning.to_give_back(self.details):
            if self.last_thinking < 0:
                self._block("thinking", out)
                self._shut(out)
            out.append(Opaque(self.last_thinking, "reasoning_details", back))
        said = FINISH.get(self.finish or "", "unknown")
        completed = 0
        for call in self.table.calls:
            if call.extra_content and call.ordinal >= 0:
                out.append(Opaque(call.ordinal, "extra_content", call.extra_content))
            if said not in _BROKEN_OFF:
                if call.ordinal < 0:
                    raise Malformed("tool_calls", f"call {call.tool_id or '?'} never got a name")
                out.append(ToolCallDone(call.ordinal))
                completed += 1
        usage = usage_of(self.usage) if self.usage else None
        return Done(finish_of(said, completed), self.finish or "", usage, self.stop_string)


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's counts, under the names that its vendors have for them."""

    def first(*paths: tuple[str, ...]) -> int | None:
        return next((found for path in paths if (found := count(raw, *path)) is not None), None)

    return Usage(
        input=count(raw, "prompt_tokens"),
        output=count(raw, "completion_tokens"),
        reasoning=first(("completion_tokens_details", "reasoning_tokens"), ("reasoning_tokens",)),
        cache_read=first(("prompt_tokens_details", "cached_tokens"), ("prompt_cache_hit_tokens",), ("cached_tokens",)),
        cache_write=count(raw, "prompt_tokens_details", "cache_write_tokens"),
        total=count(raw, "total_tokens"),
        raw=raw,
    )

"""Decodes responses of Chat Completions and compatible APIs, streamed or whole, into normalized events.

providers.md ("OpenAI Chat Completions") describes real streams. Design choices:

- Text and thinking alternate: one ends when the other begins, when a tool call begins, and at `finish_reason`. Content
  after that starts a new block.
- A tool call ends when other content begins, if its arguments are a closed object by then. Otherwise it ends with the
  response, or never, if the response was cut off by length, a filter or an error.
- A `message` is the whole answer, unless no delta came and the object says it is a chunk. Parts that were already
  emitted are skipped: text by content, calls by id or position.
- If several reasoning fields have content, only the first one with text is read. repeated_thinking.py handles thinking
  that is also in the text.
- `[DONE]` ends the response. Without it, the end of the body does, if a `finish_reason` came. `[DONE]` without a
  `finish_reason` is a normal end with finish `unknown`, so that none of its calls run.
- Only choice 0 is the answer; others become `Extra`.
"""

from __future__ import annotations

from zlib import crc32

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
from tokenbus.providers.openai_chat import reasoning, wire
from tokenbus.providers.openai_chat.calls import Call, CallTable
from tokenbus.providers.openai_chat.repeated_thinking import RepeatedThinking
from tokenbus.providers.response.decoder import ResponseDecoder, finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import is_null, read, text_of
from tokenbus.providers.response.repeats import EmittedText
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.usage import count, latest

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
    """Fields that may hold the vendor's reasoning."""
    reasoning_field: str = ""
    """The first of them that had text. Often several hold the same text, so only one is read."""
    started: bool = False
    next_ordinal: int = 0
    open_kind: OpenKind | None = None
    open_ordinal: int = -1
    """Ordinal of the open text or thinking block."""
    last_thinking: int = -1
    echo: RepeatedThinking
    text: EmittedText = msgspec.field(default_factory=EmittedText)
    thought: EmittedText = msgspec.field(default_factory=EmittedText)
    refused: EmittedText = msgspec.field(default_factory=EmittedText)
    """What was emitted: the answer, the reasoning from its fields, and the refusal."""
    thought_late: list[str] = msgspec.field(default_factory=list[str])
    """Reasoning that began after the text contained thinking, held back until it is known whether they are equal.
    """
    streamed: bool = False
    """A delta has arrived."""
    beside: set[int] = msgspec.field(default_factory=set[int])
    """Fingerprints of emitted content other than text and calls."""
    completed: int = 0
    """Number of complete calls, counted from the first."""
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
            self._release(out)
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
                self._choice(choice, chunk.object or "", out)
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
        self._release(out)
        return cut_before("finish_reason and [DONE]", began=self.started, content="answer")

    # --- content --------------------------------------------------------------------------------------------

    def _choice(self, choice: wire.Choice, form: str, out: list[Normalized]) -> None:
        if choice.delta is not None:
            self.streamed = True
            self._delta(choice.delta, out)
        is_whole = form == "chat.completion" or (choice.delta is None and self.streamed)
        # next to a delta, the message is the same piece
        if choice.message is not None and (is_whole or choice.delta is None):
            self._delta(self._remaining_of(choice.message) if is_whole else choice.message, out, whole=is_whole)
        if choice.delta is choice.message is None and choice.text:
            out.append(TextDelta(self._block("text", out), choice.text))
        if choice.finish_reason:
            self.finish = choice.finish_reason
            stop = choice.stop_reason or choice.matched_stop
            self.stop_string = stop if isinstance(stop, str) else ""
            self._release(out)
            self._close_open_block(out)

    def _delta(self, delta: wire.Delta, out: list[Normalized], *, whole: bool = False) -> None:
        self._reasoning(delta, out)
        if isinstance(delta.content, str):
            self._emit_text(delta.content, out)
        elif delta.content:
            self._parts(delta.content, out)
        if delta.refusal:
            self._release(out)
            self.refused.add(delta.refusal)
            out.append(RefusalDelta(self._block("text", out), delta.refusal))
        for place, call in enumerate(delta.tool_calls or ()):
            self._call(call, out, place=place if whole else None)
        if delta.function_call and not (delta.tool_calls or self.table.listed):
            self._call(wire.CallDelta(index=0, function=delta.function_call), out, place=0 if whole else None)
        self.table.listed = self.table.listed or bool(delta.tool_calls)
        if not (delta.annotations is delta.executed_tools is delta.audio is delta.images is wire.NOTHING):
            self._further(delta, out, whole=whole)

    def _remaining_of(self, message: wire.Delta) -> wire.Delta:
        """Remove the parts of a whole message that were already emitted. If its text differs, what was emitted
        stands.
        """
        content = message.content
        if self.text and content:
            parsed = content if isinstance(content, str) else "".join(self._texts(content))
            content = self.text.rest(parsed) or ""
        refusal = message.refusal
        if refusal and (self.refused or self.text.units):
            sent_as_text = self.text.rest(refusal) == ""
            refusal = "" if sent_as_text else self.refused.rest(refusal)
        changed: dict[str, object] = {"content": content, "refusal": refusal}
        for field in self.reasoning_fields:
            if isinstance(value := getattr(message, field, None), str):
                emitted = self.thought.rest(value) if self.thought else value
                changed[field] = "" if self.echo.says(value) else emitted
            elif value and self.thought:
                changed[field] = None
        if self.details:
            changed["reasoning_details"] = None
        return msgspec.structs.replace(message, **changed)

    def _texts(self, parts: list[msgspec.Raw]) -> list[str]:
        read_parts = (read(wire.content_part, bytes(raw), "content part") for raw in parts)
        return [part.text or "" for part in read_parts if part.type == "text"]

    def _emit_text(self, text: str, out: list[Normalized]) -> None:
        if text and (text := self.echo.take(text, self.thought)):
            self._emit_late_thinking(out)
            self.text.add(text)
            out.append(TextDelta(self._block("text", out), text))

    def _release(self, out: list[Normalized]) -> None:
        """Emit everything held back, because other content or the end follows."""
        self._emit_late_thinking(out)
        if text := self.echo.release():
            self.text.add(text)
            out.append(TextDelta(self._block("text", out), text))

    def _emit_late_thinking(self, out: list[Normalized]) -> None:
        """Emit held-back reasoning unless the text already had it."""
        late, self.thought_late = "".join(self.thought_late), []
        if late and not self.echo.says(late):
            self.thought.add(late)
            out.append(ThinkingDelta(self._block("thinking", out), late))

    def _think(self, text: str, field: str, out: list[Normalized]) -> None:
        """Emit reasoning from a field. Only the first field with content is used."""
        if text and self.reasoning_field in ("", field):
            self.reasoning_field = field
            if self.echo.inner and not self.thought:
                self._hold(len(text))
                self.thought_late.append(text)
            else:
                self.thought.add(text)
                out.append(ThinkingDelta(self._block("thinking", out), text))

    def _reasoning(self, delta: wire.Delta, out: list[Normalized]) -> None:
        for field in (self.reasoning_field,) if self.reasoning_field else self.reasoning_fields:
            if value := getattr(delta, field, None):
                text = value if isinstance(value, str) else reasoning.text_of(reasoning.pieces_of(value))
                if text:
                    self._think(text, field, out)
                    break
        if delta.reasoning_details:
            for piece in reasoning.pieces_of(delta.reasoning_details):
                self._hold(reasoning.add(self.details, piece))

    def _parts(self, parts: list[msgspec.Raw], out: list[Normalized]) -> None:
        """Decode content given as a list (Mistral)."""
        for raw in parts:
            part = read(wire.content_part, bytes(raw), "content part")
            if part.type == "text":
                self._emit_text(part.text or "", out)
            elif part.type == "thinking":
                parsed = part.thinking
                text = parsed if isinstance(parsed, str) else "".join(inner.text or "" for inner in parsed or ())
                self._think(text, "content", out)
            else:
                out.append(Extra("openai-chat.content_part", text_of(raw), self._open_or_none()))

    def _call(self, delta: wire.CallDelta, out: list[Normalized], *, place: int | None = None) -> None:
        """Process a piece of a call. With ``place``, it is the complete call at that position of the whole message."""
        function = delta.function or wire.Function()
        parsed = function.arguments
        arguments = msgspec.json.encode(parsed).decode() if isinstance(parsed, dict) else parsed or ""
        if not (delta.id or function.name or arguments):
            return
        name = function.name or ""
        if place is None:
            call = self.table.find(delta, name)
        else:
            call = self.table.find_whole(place, delta, name)
            arguments = call.emitted.rest(arguments) or ""
        if not is_null(delta.extra_content):
            call.extra_content = text_of(delta.extra_content)
            self._hold(len(call.extra_content))
        if call.ordinal < 0 and call.name:
            self._release(out)
            self._close_open_block(out)
            self._complete(out)
            call.ordinal = self._take_ordinal()
            tool_id = call.tool_id or f"call_{call.ordinal}"
            out.append(ToolCallStart(call.ordinal, tool_id, call.name, derived=not call.tool_id))
            if held := "".join(call.pieces):
                out.append(ToolCallDelta(call.ordinal, held))
                call.pieces = []
        arguments = call.new_part(arguments)
        if call.ordinal < 0:
            self._hold(len(arguments) + 64)
            call.pieces.append(arguments)
        elif arguments and not call.done:
            out.append(ToolCallDelta(call.ordinal, arguments))
        elif arguments.strip():
            raise Malformed("tool_calls", f"arguments of {call.tool_id or call.name} continue after their end")

    def _complete(self, out: list[Normalized]) -> None:
        """Complete calls whose arguments are closed, in order, because other content begins."""
        while self.completed < len(self.table.calls) and (call := self.table.calls[self.completed]).end.closed:
            if call.ordinal < 0:
                break
            self._end_call(call, out)

    def _end_call(self, call: Call, out: list[Normalized]) -> None:
        if call.extra_content:
            out.append(Opaque(call.ordinal, "extra_content", call.extra_content))
        out.append(ToolCallDone(call.ordinal))
        call.done = True
        self.completed += 1

    def _further(self, delta: wire.Delta, out: list[Normalized], *, whole: bool = False) -> None:
        """Emit content other than text and calls. For a ``whole`` message, only what was not emitted before."""
        for name in ("annotations", "executed_tools", "audio"):
            value: msgspec.Raw = getattr(delta, name)
            if not is_null(value) and bytes(value) != b"[]" and (self._is_new(bytes(value)) or not whole):
                out.append(Extra(f"openai-chat.{name}", text_of(value), self._open_or_none()))
        if not is_null(delta.images):
            for raw in read(wire.raw_items, bytes(delta.images), "images"):
                self._image(raw, out)

    def _image(self, raw: msgspec.Raw, out: list[Normalized]) -> None:
        """Emit a complete image, given as a data URL. Repeated bytes are the same image."""
        if not self._is_new(bytes(raw)):
            return
        item = read(wire.image_item, bytes(raw), "image")
        head, inline, data = (item.image_url.url if item.image_url else "").partition(";base64,")
        if not (inline and head.startswith("data:")):
            out.append(Extra("openai-chat.image", text_of(raw)))
            return
        self._release(out)
        self._close_open_block(out)
        self._complete(out)
        ordinal = self._take_ordinal()
        image = Image(ordinal, head.removeprefix("data:"), data, final=True)
        out += [BlockStart(ordinal, "image"), image, BlockStop(ordinal)]

    def _is_new(self, data: bytes) -> bool:
        mark = crc32(data)
        if mark in self.beside:
            return False
        self._hold(16)
        self.beside.add(mark)
        return True

    # --- blocks and the end ---------------------------------------------------------------------------------

    def _block(self, kind: OpenKind, out: list[Normalized]) -> int:
        """Return the open block of this kind. Closes a block of another kind."""
        if self.open_kind != kind:
            self._close_open_block(out)
            self._complete(out)
            self.open_kind, self.open_ordinal = kind, self._take_ordinal()
            if kind == "thinking":
                self.last_thinking = self.open_ordinal
            out.append(BlockStart(self.open_ordinal, kind))
        return self.open_ordinal

    def _close_open_block(self, out: list[Normalized]) -> None:
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
        self._release(out)
        self._close_open_block(out)
        if back := reasoning.to_send_back(self.details):
            if self.last_thinking < 0:
                self._block("thinking", out)
                self._close_open_block(out)
            out.append(Opaque(self.last_thinking, "reasoning_details", back))
        parsed = FINISH.get(self.finish or "", "unknown")
        for call in self.table.calls[self.completed :]:
            if parsed not in _BROKEN_OFF:
                if call.ordinal < 0:
                    raise Malformed("tool_calls", f"call {call.tool_id or '?'} has no name")
                self._end_call(call, out)
            elif call.extra_content and call.ordinal >= 0:
                out.append(Opaque(call.ordinal, "extra_content", call.extra_content))
        usage = usage_of(self.usage) if self.usage else None
        return Done(finish_of(parsed, self.completed), self.finish or "", usage, self.stop_string)


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's token counts, under any of the vendors' names for them."""

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

"""Decodes responses of Chat Completions and compatible APIs, streamed or whole, into normalized events.

providers.md ("OpenAI Chat Completions") describes real streams. Design choices:

- Text and thinking alternate: one ends when the other begins, when a tool call begins, and at `finish_reason`. Content
  after that starts a new block.
- A tool call ends when other content begins, if its arguments are a closed object by then. Otherwise it ends with the
  response, or never, if the response was cut off by length, a filter or an error.
- A `message` is the whole answer, unless no delta came and the object says it is a chunk. Parts that were already
  emitted are skipped: text by content, calls by id or position.
- Reasoning comes from fields and from parts of the content list. What a second place repeats is skipped (reasoning.py).
  repeated_thinking.py handles thinking that is also in the text.
- `[DONE]` ends the response. Without it, the end of the body does, if a `finish_reason` came. `[DONE]` without a
  `finish_reason` is a normal end with finish `unknown`, so that none of its calls run.
- Only choice 0 is the answer; others become `Extra`.
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage
from tokenbus.providers.openai_chat import reasoning, wire
from tokenbus.providers.openai_chat.answer import AnswerDecoder
from tokenbus.providers.response.decoder import finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import read, text_of
from tokenbus.providers.response.repeats import not_emitted
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.unknown_fields import UnknownField, has_value, named, read_known
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, n.FinishReason] = {
    "stop": "stop",
    "length": "length",
    "model_length": "length",  # Mistral: the context is full
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "content_filter",
    "error": "error",  # OpenRouter
}
_BROKEN_OFF: tuple[n.FinishReason, ...] = ("length", "content_filter", "error")


class ChatDecoder(AnswerDecoder, kw_only=True):
    """One response of Chat Completions; see `tokenbus.providers.api.Decoder`."""

    reasoning_fields: tuple[str, ...]
    """Fields that may hold the vendor's reasoning."""
    streamed: bool = False
    """A delta has arrived."""
    details: list[reasoning.Detail] = msgspec.field(default_factory=list[reasoning.Detail])
    finish: str | None = None
    stop_string: str = ""
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return self._finish(out) if self.started else n.Cut("[DONE] came before any content")
        chunk, unknown = wire.read_chunk(data, self.reasoning_fields)
        if chunk.error or chunk.object == "error":
            self._release(out)
            return n.Failed(provider_failure(read(wire.anything, data, "chunk")))
        usage = chunk.usage or (chunk.x_groq and chunk.x_groq.usage)
        if not self.started and (chunk.model or chunk.choices or usage):
            self.started = True
            out.append(n.Start(chunk.model or "", chunk.id or ""))
        self._describe(chunk, unknown)
        others: list[int] = []
        for place, choice in enumerate(chunk.choices or ()):
            if choice.index:
                others.append(place)
            else:
                further = [field for field in unknown if field.path[:2] == ("choices", place)] if unknown else unknown
                self._choice(choice, chunk.object or "", further, out)
        if others:
            raw = read(wire.raw_choices, data, "chunk").choices or []
            out += [n.Extra("openai-chat.choice", text_of(raw[place])) for place in others]
        if usage:
            self._count(usage, out)
        elif chunk.choices is msgspec.UNSET and self.started:
            out.append(n.Extra("openai-chat.event", data.decode()))
        return None

    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        if self.finish is not None:
            return self._finish(out)
        self._release(out)
        return cut_before("finish_reason and [DONE]", began=self.started, content="answer")

    def _describe(self, chunk: wire.Chunk, unknown: list[UnknownField]) -> None:
        """Keep the fields of a chunk that describe the answer."""
        absent = chunk.system_fingerprint is chunk.service_tier is chunk.provider is chunk.citations is wire.NOTHING
        for field, name in () if absent and chunk.search_results is wire.NOTHING else wire.ABOUT.items():
            value: msgspec.Raw = getattr(chunk, field)
            if value is wire.NOTHING or (json := text_of(value)) == self.about.get(name) or not has_value(value):
                continue
            if not self._is_told(name, json):
                self._note({name: json})
        if unknown and chunk.choices is not msgspec.UNSET:  # a chunk without choices is kept as a whole
            self._note(named("openai-chat", (field for field in unknown if field.path[0] != "choices")))

    def _cite(self, out: list[n.Normalized]) -> None:
        """Emit the sources of the answer with its text. What comes later is of the answer."""
        if self.open_kind == "text":
            self._beside(self._taken(wire.SOURCES), self.open_ordinal, out)

    # --- content --------------------------------------------------------------------------------------------

    def _choice(self, choice: wire.Choice, form: str, unknown: list[UnknownField], out: list[n.Normalized]) -> None:
        if choice.delta is not None:
            self.streamed = True
            self._delta(choice.delta, out)
        is_whole = form == "chat.completion" or (choice.delta is None and self.streamed)
        # next to a delta, the message is the same piece
        if choice.message is not None and (is_whole or choice.delta is None):
            self._delta(choice.message, out, whole=is_whole)
        if choice.delta is choice.message is None and choice.text:
            self._emit_text(choice.text, out)
        if not (
            choice.logprobs is choice.token_ids is choice.native_finish_reason is wire.NOTHING
            and choice.content_filter_results is wire.NOTHING
            and not unknown
        ):
            self._of_choice(choice, unknown, out)
        if choice.finish_reason:
            self.finish = choice.finish_reason
            stop = choice.stop_reason or choice.matched_stop
            self.stop_string = stop if isinstance(stop, str) else ""
            self._release(out)
            self._cite(out)
            self._close_open_block(out)

    def _of_choice(self, choice: wire.Choice, unknown: list[UnknownField], out: list[n.Normalized]) -> None:
        """Emit a choice's data beside its content, with the block that is open."""
        for name in wire.OF_CHOICES:
            value: msgspec.Raw = getattr(choice, name)
            if value is wire.NOTHING or not has_value(value):
                continue
            if name in wire.OF_PIECES:
                out.append(n.Extra(f"openai-chat.{name}", text_of(value), self._present_block()))
            else:
                self._beside({f"openai-chat.{name}": text_of(value)}, self._present_block(), out)
        if unknown:
            self._beside(named("openai-chat", unknown), self._present_block(), out)

    def _delta(self, delta: wire.Delta, out: list[n.Normalized], *, whole: bool = False) -> None:
        self._reasoning(delta, out, whole=whole)
        content = [("text", delta.content)] if isinstance(delta.content, str) else self._parts(delta.content or [])
        for kind, text in self._remaining_of(content) if whole else content:
            match kind:
                case "text":
                    self._emit_text(text, out)
                case "thinking":
                    self._think(text if whole else self.thought.new_part("content", text), out)
                case _:
                    out.append(n.Extra("openai-chat.content_part", text, self._open_or_none()))
        if refusal := self._remaining_refusal(delta.refusal) if whole else delta.refusal:
            self._release(out)
            self.refused.add(refusal)
            out.append(n.RefusalDelta(self._block("text", out), refusal))
        for place, call in enumerate(delta.tool_calls or ()):
            self._call(call, out, place=place if whole else None)
        if delta.function_call and not (delta.tool_calls or self.table.listed):
            self._call(wire.CallDelta(index=0, function=delta.function_call), out, place=0 if whole else None)
        self.table.listed = self.table.listed or bool(delta.tool_calls)
        if not (delta.annotations is delta.executed_tools is delta.images is wire.NOTHING):
            self._further(delta, out, whole=whole)
        if delta.audio is not wire.NOTHING and not (whole and self.spoken) and has_value(delta.audio):
            self._speak(delta.audio, out)

    def _remaining_of(self, content: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Remove what was emitted from the content of a whole message. If its text differs, emitted text stays."""
        texts = [text for kind, text in content if kind == "text"]
        thoughts = [text for kind, text in content if kind == "thinking"]
        if self.text:
            texts = not_emitted([self.text], texts) or [""] * len(texts)
        if thoughts:
            thoughts = self.thought.rest_of_whole("content", thoughts)
        rests = {"text": iter(texts), "thinking": iter(thoughts)}
        return [(kind, next(rests[kind]) if kind in rests else text) for kind, text in content]

    def _remaining_refusal(self, refusal: str | None) -> str | None:
        if not refusal or not (self.refused or self.text.units):
            return refusal
        return "" if self.text.rest(refusal) == "" else self.refused.rest(refusal)

    def _reasoning(self, delta: wire.Delta, out: list[n.Normalized], *, whole: bool) -> None:
        for field in self.reasoning_fields:
            if value := getattr(delta, field, None):
                text = value if isinstance(value, str) else reasoning.text_of(reasoning.pieces_of(value))
                if text and not (whole and self.echo.says(text)):
                    rest = self.thought.rest_of_whole(field, [text])[0] if whole else self.thought.new_part(field, text)
                    self._think(rest, out)
        if delta.reasoning_details and not (whole and self.details):
            for piece in reasoning.pieces_of(delta.reasoning_details):
                self._hold(reasoning.add(self.details, piece))

    def _parts(self, parts: list[msgspec.Raw]) -> list[tuple[str, str]]:
        """The kind and text of the parts of content given as a list (Mistral); of other kinds, the whole part."""
        found: list[tuple[str, str]] = []
        for raw in parts:
            part, unknown = read_known(wire.content_part, wire.ContentPart, bytes(raw), "content part")
            if unknown and part.type in ("text", "thinking"):
                self._note(named("openai-chat", unknown, "content"))
            match part.type:
                case "text":
                    found.append(("text", part.text or ""))
                case "thinking":
                    parsed = part.thinking
                    text = parsed if isinstance(parsed, str) else "".join(inner.text or "" for inner in parsed or ())
                    found.append(("thinking", text))
                case _:
                    found.append(("", text_of(raw)))
        return found

    # --- the end --------------------------------------------------------------------------------------------

    def _count(self, usage: dict[str, object], out: list[n.Normalized]) -> None:
        if (raw := latest(self.usage, usage)) != self.usage:
            self.usage = raw
            out.append(n.UsageSeen(usage_of(raw)))

    def _finish(self, out: list[n.Normalized]) -> n.Done:
        self._release(out)
        self._cite(out)
        self._close_open_block(out)
        if back := reasoning.to_send_back(self.details):
            if self.last_thinking < 0:
                self._block("thinking", out)
                self._close_open_block(out)
            out.append(n.Opaque(self.last_thinking, "reasoning_details", back))
        parsed = FINISH.get(self.finish or "", "unknown")
        for call in self.table.calls[self.completed :]:
            if parsed not in _BROKEN_OFF:
                if call.ordinal < 0:
                    raise Malformed("tool_calls", f"call {call.tool_id or '?'} has no name")
                self._end_call(call, out)
            elif call.extra_content and call.ordinal >= 0:
                out.append(n.Opaque(call.ordinal, "extra_content", call.extra_content))
        usage = usage_of(self.usage) if self.usage else None
        return n.Done(finish_of(parsed, self.completed), self.finish or "", usage, self.stop_string)


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

"""Writes an answer as blocks, from its pieces: text and thinking that alternate, calls, images and the rest."""

from __future__ import annotations

import re
from typing import Literal
from zlib import crc32

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events import normalized as n
from tokenbus.events.quirks import Quirks
from tokenbus.providers.openai_chat import wire
from tokenbus.providers.openai_chat.reasoning import EmittedThinking
from tokenbus.providers.openai_chat.wire import CallDelta
from tokenbus.providers.response import sound
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS, ResponseDecoder
from tokenbus.providers.response.json_decode import is_null, read, text_of
from tokenbus.providers.response.repeats import EmittedText
from tokenbus.providers.response.unknown_fields import has_value, named, read_known

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class ObjectEnd(msgspec.Struct):
    """Detects when streamed JSON closes its outermost object. Does not validate the JSON."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    closed: bool = False

    def feed(self, text: str) -> None:
        """Process the next piece."""
        at = 1 if self.escaped and text else 0
        self.escaped = self.escaped and not text
        while found := (_IN_STRING if self.in_string else _OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case "\\":
                    at += 1
                    self.escaped = at > len(text)
                case '"':
                    self.in_string = not self.in_string
                case "{" | "[":
                    self.depth += 1
                case _:
                    self.depth -= 1
                    self.closed = self.closed or (self.depth == 0 and found[0] == "}")


class ReceivedCall(msgspec.Struct):
    """A tool call being received. It starts, and gets its ordinal, once its name is known."""

    ordinal: int = -1
    tool_id: str = ""
    """The provider's id; empty until known."""
    name: str = ""
    pieces: list[str] = []
    """Argument fragments that came before the name."""
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    """Its arguments emitted so far."""
    end: ObjectEnd = msgspec.field(default_factory=ObjectEnd)
    done: bool = False
    """The call is complete and later content has begun."""
    extra_content: str = ""
    free_text: bool = False
    """Its arguments are no JSON, so only the answer's end says that they are complete."""

    def new_part(self, arguments: str) -> str:
        """Return the new part of this piece: empty if complete arguments are repeated."""
        if self.free_text:
            self.emitted.add(arguments)
            return arguments
        if self.end.closed and self.emitted.rest(arguments) == "":
            return ""
        self.emitted.add(arguments)
        self.end.feed(arguments)
        return arguments


class CallTable(msgspec.Struct):
    """The calls of one response, in order of appearance.

    A piece is matched by its `index`, if it has one. Real streams omit the index or send null (Mistral), leave the id
    empty after the first piece (Alibaba), send the name late or repeatedly, number all parallel calls 0 (Gemini's chat
    endpoint), or repeat a call once it is complete (MiniMax).
    """

    calls: list[ReceivedCall] = []
    by_index: dict[int, int] = {}
    listed: bool = False
    """Whether calls arrived in `tool_calls`. Then a `function_call` repeats one of them."""

    def find(self, delta: CallDelta, name: str) -> ReceivedCall:
        """Return the call of this piece, adding it if it is new. Raises TooLarge if there are too many."""
        tool_id = delta.id or ""
        at = self._position(delta.index, tool_id, name)
        if at is None:
            at = self._add()
        if delta.index is not None:
            self.by_index[delta.index] = at
        return self._known(at, tool_id, name)

    def find_whole(self, place: int, delta: CallDelta, name: str) -> ReceivedCall:
        """Return the call at this position of the final message, matched by id or else by position. Raises TooLarge."""
        tool_id = delta.id or ""
        at = next((at for at, call in enumerate(self.calls) if tool_id and call.tool_id == tool_id), None)
        if at is None and place < len(self.calls) and self.calls[place].name in ("", name):
            at = place
        return self._known(self._add() if at is None else at, tool_id, name)

    def _add(self) -> int:
        if len(self.calls) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.calls) + 1, MAX_OPEN_BLOCKS, unit="blocks")
        self.calls.append(ReceivedCall())
        return len(self.calls) - 1

    def _known(self, at: int, tool_id: str, name: str) -> ReceivedCall:
        call = self.calls[at]
        call.tool_id = call.tool_id or tool_id
        call.name = call.name or name
        return call

    def _position(self, index: int | None, tool_id: str, name: str) -> int | None:
        if index is not None:
            at = self.by_index.get(index)
            if at is None:
                return None
            known = self.calls[at].tool_id
            # A different id together with a name means another call, even with the same index.
            return None if name and tool_id and known and tool_id != known else at
        if tool_id:
            return next((at for at, call in enumerate(self.calls) if call.tool_id == tool_id), None)
        return None if name or not self.calls else len(self.calls) - 1


MAX_CHARS = 256 * 1024
"""Maximum length of tagged thinking to compare with the reasoning field."""
_ROOM = 256
"""How far into a text to look for the opening tag."""


class RepeatedThinking(msgspec.Struct):
    """Drops thinking that a vendor sends twice: in a reasoning field and between tags at the start of the text.

    Once the reasoning field has content, a text that starts with the tag is held back until the tag closes. If the
    tagged content differs from the field, it is emitted unchanged. The fields of this struct are its whole state.
    """

    names: tuple[str, ...]
    """Tag names."""
    place: Literal["start", "inside", "after"] = "start"
    close: str = ""
    """The tag that closes the thinking in the text."""
    waits: bool | None = None
    """Whether the reasoning field had content before the text began."""
    held: list[str] = []
    """The beginning of the text, while it may be repeated thinking."""
    size: int = 0
    """Characters received in the current place."""
    tail: str = ""
    """The end of the searched text: a possible beginning of a tag."""
    inner: EmittedText = msgspec.field(default_factory=EmittedText)
    """The text between the tags, as far as it was searched."""

    @classmethod
    def of(cls, quirks: Quirks) -> RepeatedThinking:
        """For a vendor with these tags, or with those that are usual."""
        names = quirks.inline_thinking or ("think", "thinking", "thought", "reasoning")
        if quirks.inline_thinking_opened:
            return cls(names, "inside", f"</{names[0]}>")
        return cls(names)

    def take(self, piece: str, thought: EmittedText) -> str:
        """Return the text to emit now. ``thought``: what the reasoning field has brought so far."""
        if self.place == "after":
            return piece
        if self.waits is None:
            self.waits = bool(thought)
        if self.waits:
            self.held.append(piece)
        self.size += len(piece)
        left = self._search(piece, thought)
        return left if self.waits else piece

    def says(self, thought: str) -> bool:
        """Whether the text contained this thinking between its tags."""
        return self.place == "after" and bool(self.inner) and self.inner.rest(thought) == ""

    def release(self) -> str:
        """Return held-back content as text."""
        held, self.held = "".join(self.held), []
        if held:
            self.place = "after"
        return held

    def _search(self, piece: str, thought: EmittedText) -> str:
        """Search the held-back text for its tags. Return the text that is certain by now and not repeated thinking."""
        if self.place == "start":
            begun = (self.tail + piece).lstrip()
            tags = [f"<{name}>" for name in self.names]
            tag = next((tag for tag in tags if begun.startswith(tag)), "")
            if not tag:
                self.tail = begun
                return (
                    "" if self.size <= _ROOM and any(tag.startswith(begun) for tag in tags) else self._stop_comparing()
                )
            self.place, self.close, self.tail = "inside", f"</{tag[1:]}", ""
            piece = begun[len(tag) :]
        text = self.tail + piece
        end = text.find(self.close)
        if end < 0:
            keep = max(0, len(text) - len(self.close) + 1)
            self.inner.add(text[:keep])
            self.tail = text[keep:]
            return "" if self.size <= MAX_CHARS else self._stop_comparing()
        self.inner.add(text[:end])
        if (self.inner.units, self.inner.crc) != (thought.units, thought.crc):
            return self._stop_comparing()
        self.place, self.held = "after", []
        return text[end + len(self.close) :]

    def _stop_comparing(self) -> str:
        self.place = "after"
        return self.release()


class AnswerDecoder(ResponseDecoder, kw_only=True):
    """Emits the pieces of an answer, each once. The subclass finds the pieces in the API's events."""

    open_kind: n.OpenKind | None = None
    open_ordinal: int = -1
    """Ordinal of the open text or thinking block."""
    last_thinking: int = -1
    echo: RepeatedThinking
    text: EmittedText = msgspec.field(default_factory=EmittedText)
    thought: EmittedThinking = msgspec.field(default_factory=EmittedThinking)
    refused: EmittedText = msgspec.field(default_factory=EmittedText)
    """What was emitted: the answer, the reasoning outside of its text, and the refusal."""
    thought_late: list[str] = msgspec.field(default_factory=list[str])
    """Reasoning that began after the text contained thinking, held back until it is known whether they are equal.
    """
    beside: set[int] = msgspec.field(default_factory=set[int])
    """Fingerprints of emitted content other than text and calls."""
    spoken: bool = False
    """Whether the answer had audio."""
    sound: list[str] = msgspec.field(default_factory=list[str])
    """The sound of the open audio block, in pieces of base64."""
    audio_id: str = ""
    audio_expires_at: int = 0
    completed: int = 0
    """Number of complete calls, counted from the first."""
    table: CallTable = msgspec.field(default_factory=CallTable)

    # --- text and thinking -----------------------------------------------------------------------------------

    def _emit_text(self, text: str, out: list[n.Normalized]) -> None:
        if text and (text := self.echo.take(text, self.thought.emitted)):
            self._emit_late_thinking(out)
            self.text.add(text)
            out.append(n.TextDelta(self._block("text", out), text))

    def _release(self, out: list[n.Normalized]) -> None:
        """Emit everything held back, because other content or the end follows."""
        self._emit_late_thinking(out)
        if text := self.echo.release():
            self.text.add(text)
            out.append(n.TextDelta(self._block("text", out), text))

    def _emit_late_thinking(self, out: list[n.Normalized]) -> None:
        """Emit held-back reasoning unless the text already had it."""
        late, self.thought_late = "".join(self.thought_late), []
        if late and not self.echo.says(late):
            out.append(n.ThinkingDelta(self._block("thinking", out), late))

    def _think(self, text: str, out: list[n.Normalized]) -> None:
        """Emit reasoning that came outside of the text, and that no other place brought."""
        if text and (self.thought_late or (self.echo.inner and self.last_thinking < 0)):
            self._hold(len(text))
            self.thought_late.append(text)
        elif text:
            out.append(n.ThinkingDelta(self._block("thinking", out), text))

    # --- tool calls ------------------------------------------------------------------------------------------

    def _call(self, delta: wire.CallDelta, out: list[n.Normalized], *, place: int | None = None) -> None:
        """Process a piece of a call. With ``place``, it is the complete call at that position of the whole message."""
        function, custom = delta.function or wire.Function(), delta.custom
        if custom:
            function = wire.Function(name=custom.name, arguments=custom.input)
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
        call.free_text = call.free_text or custom is not None
        if not is_null(delta.extra_content):
            call.extra_content = text_of(delta.extra_content)
            self._hold(len(call.extra_content))
        if call.ordinal < 0 and call.name:
            self._release(out)
            self._close_open_block(out)
            self._complete(out)
            call.ordinal = self._take_ordinal()
            tool_id = call.tool_id or f"call_{call.ordinal}"
            free = call.free_text
            out.append(n.ToolCallStart(call.ordinal, tool_id, call.name, derived=not call.tool_id, free_text=free))
            if held := "".join(call.pieces):
                out.append(n.ToolCallDelta(call.ordinal, held))
                call.pieces = []
        arguments = call.new_part(arguments)
        if call.ordinal < 0:
            self._hold(len(arguments) + 64)
            call.pieces.append(arguments)
        elif arguments and not call.done:
            out.append(n.ToolCallDelta(call.ordinal, arguments))
        elif arguments.strip():
            raise Malformed("tool_calls", f"arguments of {call.tool_id or call.name} continue after their end")

    def _complete(self, out: list[n.Normalized]) -> None:
        """Complete calls whose arguments are closed, in order, because other content begins."""
        while self.completed < len(self.table.calls) and (call := self.table.calls[self.completed]).end.closed:
            if call.ordinal < 0:
                break
            self._end_call(call, out)

    def _end_call(self, call: ReceivedCall, out: list[n.Normalized]) -> None:
        if call.extra_content:
            out.append(n.Opaque(call.ordinal, "extra_content", call.extra_content))
        out.append(n.ToolCallDone(call.ordinal))
        call.done = True
        self.completed += 1

    # --- what else an answer holds ---------------------------------------------------------------------------

    def _further(self, delta: wire.Delta, out: list[n.Normalized], *, whole: bool = False) -> None:
        """Emit content other than text and calls. For a ``whole`` message, only what was not emitted before."""
        if not is_null(delta.executed_tools):
            for raw in read(wire.raw_items, bytes(delta.executed_tools), "executed_tools"):
                self._executed(raw, out)
        value = delta.annotations
        if has_value(value) and (self._is_new(bytes(value)) or not whole):
            out.append(n.Extra("openai-chat.annotations", text_of(value), self._open_or_none()))
        if not is_null(delta.images):
            for raw in read(wire.raw_items, bytes(delta.images), "images"):
                self._image(raw, out)

    def _speak(self, raw: msgspec.Raw, out: list[n.Normalized]) -> None:
        """Emit what a piece of the spoken answer says; its sound follows as a whole, when the block ends."""
        audio, unknown = read_known(wire.audio, wire.Audio, bytes(raw), "audio")
        if self.spoken and self.open_kind != "audio" and not (audio.data or audio.transcript):
            return
        self.spoken = True
        ordinal = self._block("audio", out)
        self._beside(named("openai-chat", unknown, "audio"), ordinal, out)
        self.audio_id, self.audio_expires_at = audio.id or self.audio_id, audio.expires_at or self.audio_expires_at
        if audio.transcript:
            out.append(n.TranscriptDelta(ordinal, audio.transcript))
        if audio.data:
            self._hold(len(audio.data) + 64)
            self.sound.append(audio.data)

    def _executed(self, raw: msgspec.Raw, out: list[n.Normalized]) -> None:
        """Emit a tool that the provider ran; it sends one again with its output."""
        if self._is_new(bytes(raw)):
            self._release(out)
            self._close_open_block(out)
            self._complete(out)
            ordinal = self._take_ordinal()
            tool = read(wire.executed_tool, bytes(raw), "executed tool")
            out += [
                n.ItemStart(ordinal, "openai-chat.executed_tools", tool.name or tool.type or ""),
                n.ToolCallDelta(ordinal, text_of(raw)),
                n.BlockStop(ordinal),
            ]

    def _image(self, raw: msgspec.Raw, out: list[n.Normalized]) -> None:
        """Emit a complete image, given as a data URL. Repeated bytes are the same image."""
        if not self._is_new(bytes(raw)):
            return
        item = read(wire.image_item, bytes(raw), "image")
        head, inline, data = (item.image_url.url if item.image_url else "").partition(";base64,")
        if not (inline and head.startswith("data:")):
            out.append(n.Extra("openai-chat.image", text_of(raw)))
            return
        self._release(out)
        self._close_open_block(out)
        self._complete(out)
        ordinal = self._take_ordinal()
        image = n.Image(ordinal, head.removeprefix("data:"), data, final=True)
        out += [n.BlockStart(ordinal, "image"), image, n.BlockStop(ordinal)]

    def _is_new(self, data: bytes) -> bool:
        mark = crc32(data)
        if mark in self.beside:
            return False
        self._hold(16)
        self.beside.add(mark)
        return True

    # --- blocks ----------------------------------------------------------------------------------------------

    def _block(self, kind: n.OpenKind, out: list[n.Normalized]) -> int:
        """Return the open block of this kind. Closes a block of another kind."""
        if self.open_kind != kind:
            self._close_open_block(out)
            self._complete(out)
            self.open_kind, self.open_ordinal = kind, self._take_ordinal()
            if kind == "thinking":
                self.last_thinking = self.open_ordinal
            out.append(n.BlockStart(self.open_ordinal, kind))
        return self.open_ordinal

    def _close_open_block(self, out: list[n.Normalized]) -> None:
        if self.open_kind == "audio" and self.sound:
            base64 = sound.joined(self.sound)
            about = (self.audio_id, self.audio_expires_at)
            out.append(n.Audio(self.open_ordinal, sound.media_type_of(base64), base64, *about))
            self._hold(-sum(len(piece) + 64 for piece in self.sound))
            self.sound, self.audio_id, self.audio_expires_at = [], "", 0
        if self.open_kind is not None:
            out.append(n.BlockStop(self.open_ordinal))
            self.open_kind, self.open_ordinal = None, -1

    def _present_block(self) -> int | None:
        """Return the open text or thinking, or else the call that is not complete; None if there is neither."""
        if self.open_kind:
            return self.open_ordinal
        calls = [call.ordinal for call in self.table.calls[self.completed :] if call.ordinal >= 0 and not call.done]
        return calls[-1] if calls else None

    def _open_or_none(self) -> int | None:
        return self.open_ordinal if self.open_kind else None

"""Decodes answers of the Interactions API, streamed or whole, into normalized events.

An interaction is a list of steps. Each step of a stream is a start, deltas and a stop. Design choices:

- The text of a `model_output` is a block; an image or sound between two texts makes them two. A `thought` is one block,
  its summary the text. A `function_call` is a call. Any other step is an item: tools that the provider runs, their
  results, and what this version does not know. It goes back as the whole step that its start and its deltas make.
- A delta of an item has fields of the step: a list continues a list, any other value replaces an earlier one.
- An image or a document by its address is an item, because its bytes are not in the answer.
- A status that ends the interaction ends the answer, also if the body ends behind a `status_update`.
- `user_input` repeats what was sent. Steps in the last event repeat those of the stream; only what the stream lacked is
  emitted. So a stream that was cut is completed by the whole interaction (`jobs`).
- A failed interaction is an error, unless a filter stopped it; a cancelled one too: no client of ours cancels it this
  way.
- `requires_continuation` is a pause: the token for the next request is kept (`CONTINUATION`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage
from tokenbus.providers.gemini_interactions import wire
from tokenbus.providers.response import sound
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS, ResponseDecoder, finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import compact, is_null, read, text_of
from tokenbus.providers.response.repeats import EmittedText
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.unknown_fields import has_value, named
from tokenbus.providers.response.usage import count, latest

API = "gemini-interactions"
CONTINUATION = f"{API}.continuation_token"
"""Name of the item with the token of an interaction that has to be continued."""
FINISH: dict[str, n.FinishReason] = {
    "completed": "stop",
    "requires_action": "tool_use",
    "incomplete": "length",
    "budget_exceeded": "length",
    "requires_continuation": "pause",
}
_ENDED = {*FINISH, "failed", "cancelled"}
_OF_A_TOOL = ("_call", "_result")
"""How the types of steps end of tools that the provider runs."""

Kind = Literal["output", "thought", "call", "item"]


class StreamedStep(msgspec.Struct, omit_defaults=True):
    """A step between its start and its end, or what is known of one that has ended."""

    kind: Kind
    type: str
    ordinal: int = -1
    """thought, call, item: its block. output: the open block; -1: none."""
    audio: bool = False
    """output: the open block is sound."""
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    """Its whole text, or a call's arguments."""
    media: int = 0
    """Images and other content besides text."""
    pieces: list[str] = []
    """output: citations of the open text, or pieces of the open sound."""
    media_type: str = ""
    prefilled: str = ""
    """call: the arguments in its start; used only if no delta follows."""
    fields: dict[str, list[str]] = {}
    """item: JSON of its fields; several lists are one."""
    held: int = 0
    """Bytes buffered until its end."""


class InteractionsDecoder(ResponseDecoder, kw_only=True):
    """Decodes one interaction; see `tokenbus.providers.api.Decoder`."""

    open: dict[int, StreamedStep] = msgspec.field(default_factory=dict[int, StreamedStep])
    """Open steps by the provider's index."""
    steps: list[StreamedStep] = msgspec.field(default_factory=list[StreamedStep])
    """Steps that have ended, in order."""
    calls: int = 0
    """Number of completed tool calls."""
    tool_names: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Names of tools that the provider runs, by the id of the call; a result may have only the id."""
    state: str = ""
    """The latest status of the interaction."""
    failure: str = ""
    """JSON of the error of a step."""
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return None
        parsed, unknown = wire.read_event(data)
        match parsed:
            case wire.ErrorEvent():
                return self._failed(provider_failure(read(wire.anything, data, "event")))
            case wire.Interaction():
                self._note(named(API, unknown, "interaction"))
                return self._whole(parsed, data, out)
            case wire.Unknown():
                if self.started:
                    self._extra(parsed.event_type, data.decode(), out)
                return None
            case wire.StepStart() | wire.StepDelta() | wire.StepStop():
                self._begin(None, out)
                block = self._block_of(parsed.index)
                self._step_event(parsed, out)
                self._beside(named(API, unknown, parsed), self._block_of(parsed.index) or block, out)
                return None
            case _:
                self._note(named(API, unknown, parsed))
        match parsed:
            case wire.Created():
                self._begin(parsed.interaction, out)
                self._about(parsed.interaction, out)
            case wire.StatusUpdate():
                self._begin(None, out)
                self.state = parsed.status
                self._token(parsed.continuation_token)
                self._count(parsed.usage, out)
            case wire.Completed():
                self._begin(parsed.interaction, out)
                self._about(parsed.interaction, out)
                self._emit_missing(parsed.interaction.steps or [], out)
                return self._end_as(parsed.interaction, out)
        return None

    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        if self.state in _ENDED:
            return self._end_as(wire.Interaction(status=self.state), out)
        return cut_before("interaction.completed", began=self.started, content="interaction")

    # --- the interaction --------------------------------------------------------------------------------------

    def _begin(self, interaction: wire.Interaction | None, out: list[n.Normalized]) -> None:
        if not self.started:
            self.started = True
            about = interaction or wire.Interaction()
            out.append(n.Start(about.model or about.agent or "", about.id or ""))

    def _whole(self, interaction: wire.Interaction, data: bytes, out: list[n.Normalized]) -> n.Terminal:
        """Handle an answer that was not streamed, or an error as gateways in front of the API send it."""
        if interaction.status is None:
            if has_value(interaction.error):
                return n.Failed(provider_failure(read(wire.anything, data, "event")))
            raise Malformed("event", "neither an event nor an interaction")
        self._begin(interaction, out)
        self._about(interaction, out)
        self._emit_missing(interaction.steps or [], out)
        return self._end_as(interaction, out)

    def _about(self, interaction: wire.Interaction, out: list[n.Normalized]) -> None:
        if has_value(interaction.service_tier):
            self._note({f"{API}.service_tier": text_of(interaction.service_tier)})
        self._token(interaction.continuation_token)
        self._count(interaction.usage, out)

    def _token(self, token: Raw) -> None:
        if has_value(token):
            self._note({CONTINUATION: text_of(token)})

    def _count(self, usage: wire.Usage, out: list[n.Normalized]) -> None:
        if usage and (raw := latest(self.usage, usage)) != self.usage:
            self.usage = raw
            out.append(n.UsageSeen(usage_of(raw)))

    def _failed(self, error: ErrorInfo) -> n.Terminal:
        """A filter that stops the model is an error of this API, and an end like any other in all APIs."""
        if self.started and error.kind == "content_filter":
            return n.Done("content_filter", error.code, usage_of(self.usage) if self.usage else None)
        return n.Failed(error)

    def _end_as(self, interaction: wire.Interaction, out: list[n.Normalized]) -> n.Terminal:
        """End with the interaction's status. A call or item without a stop stays open: it is incomplete."""
        status = interaction.status or self.state
        failed = next((e for e in (interaction.errors, interaction.error) if has_value(e)), None)
        if status == "failed":
            error = text_of(failed) if failed else self.failure
            known = read(wire.anything, error.encode(), "errors") if error else {"code": "interaction_failed"}
            return self._failed(provider_failure(known))
        if status == "cancelled":
            return n.Failed(ErrorInfo(code="cancelled", kind="unknown", message="the interaction was cancelled"))
        if status in ("queued", "in_progress", ""):
            return n.Cut(f"the interaction is not complete (status: {status or 'missing'})")
        if failed:
            self._note({f"{API}.errors": text_of(failed)})
        for index in [at for at, step in self.open.items() if step.kind in ("output", "thought")]:
            self._stop(index, out)
        usage = usage_of(self.usage) if self.usage else None
        finish = finish_of(FINISH.get(status, "unknown"), self.calls)
        if status == "requires_action" and not self.calls:
            finish = "requires_action"
        return n.Done(finish, status, usage)

    # --- its steps --------------------------------------------------------------------------------------------

    def _step_event(self, event: wire.StepStart | wire.StepDelta | wire.StepStop, out: list[n.Normalized]) -> None:
        match event:
            case wire.StepStart():
                if event.index in self.open:
                    raise Malformed("step.start", f"index {event.index} is already open")
                self._start(event.index, bytes(event.step), out)
            case wire.StepDelta():
                if event.metadata:
                    self._count(event.metadata.total_usage, out)
                if (step := self.open.get(event.index)) is None:
                    raise Malformed("step.delta", f"index {event.index} is not open")
                self._delta(step, bytes(event.delta), out)
            case wire.StepStop():
                self._count(event.usage, out)
                if has_value(event.step_usage):
                    self._extra("step_usage", text_of(event.step_usage), out, self._block_of(event.index))
                self._stop(event.index, out)

    def _start(self, index: int, data: bytes, out: list[n.Normalized]) -> None:
        if len(self.open) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open steps", len(self.open) + 1, MAX_OPEN_BLOCKS, unit="steps")
        parsed, unknown = wire.read_step(data)
        match parsed:
            case wire.ModelOutput():
                step = self.open[index] = StreamedStep("output", "model_output")
                for entry in parsed.content or ():
                    self._content(step, bytes(entry), out)
                if has_value(parsed.error):
                    self.failure = text_of(parsed.error)
                    self._extra("error", self.failure, out)
            case wire.Thought():
                step = self.open[index] = StreamedStep("thought", "thought", self._take_ordinal())
                out.append(n.BlockStart(step.ordinal, "thinking"))
                for entry in parsed.summary or ():
                    self._content(step, bytes(entry), out)
                self._sign(step, parsed.signature, out)
            case wire.FunctionCall():
                if not parsed.name:
                    raise Malformed("step.start", "function_call has no name")
                step = self.open[index] = StreamedStep("call", "function_call", self._take_ordinal())
                tool_id = parsed.id or f"call_{step.ordinal}"
                out.append(n.ToolCallStart(step.ordinal, tool_id, parsed.name, derived=not parsed.id))
                self._sign(step, parsed.signature, out)
                step.prefilled = compact(parsed.arguments)
                self._hold_for(step, len(step.prefilled))
            case wire.Other():
                step = self.open[index] = StreamedStep("item", parsed.type)
                if parsed.type == "user_input":
                    return
                step.ordinal = self._take_ordinal()
                out.append(n.ItemStart(step.ordinal, f"{API}.{parsed.type}", *self._tool_of(parsed)))
                self._merge(step, data)
        self._beside(named(API, unknown, "step"), step.ordinal if step.ordinal >= 0 else None, out)

    def _delta(self, step: StreamedStep, data: bytes, out: list[n.Normalized]) -> None:
        if step.kind == "item":
            self._merge(step, data)
            return
        self._content(step, data, out)

    def _content(self, step: StreamedStep, data: bytes, out: list[n.Normalized]) -> None:
        """Handle a delta, or an entry of a step's content or summary."""
        parsed, unknown = wire.read_piece(data)
        match parsed:
            case wire.Arguments() if step.kind == "call":
                if parsed.arguments:
                    step.emitted.add(parsed.arguments)
                    out.append(n.ToolCallDelta(step.ordinal, parsed.arguments))
            case wire.ThoughtSignature():
                self._sign(step, parsed.signature, out)
            case wire.ThoughtSummary() if step.kind == "thought":
                if not is_null(parsed.content):
                    self._content(step, bytes(parsed.content), out)
            case wire.Text() if step.kind == "thought":
                if parsed.text:
                    step.emitted.add(parsed.text)
                    out.append(n.ThinkingDelta(step.ordinal, parsed.text))
            case wire.Text() if step.kind == "output":
                if parsed.text:
                    self._text(step, parsed.text, out)
                self._cite(step, parsed.annotations, out)
            case wire.Annotations() if step.kind == "output":
                self._cite(step, parsed.annotations, out)
            case wire.Image() if parsed.data:
                self._image(step, parsed, out)
            case wire.Audio() if parsed.data and step.kind == "output":
                self._sound(step, parsed, out)
            case None if step.kind == "output":
                self._by_address(step, data, out)
            case wire.Image() | wire.Audio() if step.kind == "output":
                self._by_address(step, data, out)
                return
            case _:
                self._extra("delta", data.decode(), out, step.ordinal if step.ordinal >= 0 else None)
                return
        self._beside(named(API, unknown, "delta"), step.ordinal if step.ordinal >= 0 else None, out)

    def _stop(self, index: int, out: list[n.Normalized]) -> None:
        step = self.open.pop(index, None)
        if step is None:
            return
        match step.kind:
            case "output":
                self._close_block(step, out)
            case "thought":
                out.append(n.BlockStop(step.ordinal))
            case "call":
                if not step.emitted and step.prefilled:
                    out.append(n.ToolCallDelta(step.ordinal, step.prefilled))
                    step.emitted.add(step.prefilled)
                out.append(n.ToolCallDone(step.ordinal))
                self.calls += 1
            case "item":
                if step.ordinal >= 0:
                    self._end_item(step.ordinal, step.fields, out)
        self._hold(96 - step.held)
        self.steps.append(StreamedStep(step.kind, step.type, step.ordinal, emitted=step.emitted, media=step.media))

    def _emit_missing(self, whole: Sequence[Raw], out: list[n.Normalized]) -> None:
        """Emit the steps of a whole interaction that the stream lacked, and the rest of those that it had in part."""
        known: dict[str, list[tuple[int | None, StreamedStep]]] = {}
        for at, step in [*((None, ended) for ended in self.steps), *self.open.items()] if whole else ():
            known.setdefault(step.type, []).append((at, step))
        for raw in whole:
            parsed, _ = wire.read_step(bytes(raw))
            kind = parsed.type if isinstance(parsed, wire.Other) else str(parsed.__struct_config__.tag)
            if not (same := known.get(kind)):
                self._emit_step(bytes(raw), out)
                continue
            at, step = same.pop(0)
            if at is not None:
                self._complete(at, step, parsed, bytes(raw), out)
            elif left := _left_of(parsed, step):
                field = "content" if step.kind == "output" else "summary"
                self._emit_step(msgspec.json.encode({"type": kind, field: left}), out)

    def _emit_step(self, data: bytes, out: list[n.Normalized]) -> None:
        index = max(self.open, default=-1) + 1  # a step that was cut off may be open
        self._start(index, data, out)
        self._stop(index, out)

    def _complete(
        self, at: int, step: StreamedStep, whole: wire.Step | wire.Other, data: bytes, out: list[n.Normalized]
    ) -> None:
        """Complete an open step by its whole form. One that this contradicts stays open: it is incomplete."""
        match whole:
            case wire.FunctionCall():
                rest = step.emitted.rest(compact(whole.arguments))
                if rest is None:
                    return
                if rest:
                    step.emitted.add(rest)
                    out.append(n.ToolCallDelta(step.ordinal, rest))
            case wire.Other():
                step.fields = {}
                self._merge(step, data)
            case _:
                for entry in _left_of(whole, step):
                    self._content(step, bytes(entry), out)
                self._sign(step, whole.signature if isinstance(whole, wire.Thought) else None, out)
        self._stop(at, out)

    def _block_of(self, index: int) -> int | None:
        step = self.open.get(index)
        return step.ordinal if step and step.ordinal >= 0 else None

    def _tool_of(self, step: wire.Other) -> tuple[str, str]:
        """The name of the tool that runs or whose result it is, and the id of the call."""
        tool_id = step.id or step.call_id or ""
        end = next((end for end in _OF_A_TOOL if step.type.endswith(end)), None)
        name = self.tool_names.get(tool_id) or step.name or (step.type.removesuffix(end) if end else "")
        if step.id and step.name and step.id not in self.tool_names:
            self._hold(len(step.id) + len(step.name) + 64)
            self.tool_names[step.id] = step.name
        return name, tool_id

    def _merge(self, step: StreamedStep, data: bytes) -> None:
        """Add the fields of a start or a delta to an item. Empty values say nothing of those before."""
        for name, value in read(wire.fields, data, "step").items():
            known = step.fields.get(name)
            if known and not has_value(value):
                continue
            new = text_of(value)
            self._hold_for(step, len(new) + 64)
            if known and new[:1] == "[" and known[0] != "[]":
                known.append(new)
            else:
                step.fields[name] = [new]

    # --- what steps hold --------------------------------------------------------------------------------------

    def _text(self, step: StreamedStep, text: str, out: list[n.Normalized]) -> None:
        self._open_text(step, out)
        step.emitted.add(text)
        out.append(n.TextDelta(step.ordinal, text))

    def _open_text(self, step: StreamedStep, out: list[n.Normalized]) -> None:
        if step.audio:
            self._close_block(step, out)
        if step.ordinal < 0:
            step.ordinal = self._take_ordinal()
            out.append(n.BlockStart(step.ordinal, "text"))

    def _cite(self, step: StreamedStep, annotations: list[Raw] | None, out: list[n.Normalized]) -> None:
        """Emit citations at once, and keep them to send back with their text."""
        for annotation in annotations or ():
            self._open_text(step, out)
            self._hold_for(step, len(bytes(annotation)) + 64)
            step.pieces.append(text_of(annotation))
            self._extra("annotation", step.pieces[-1], out, step.ordinal)

    def _image(self, step: StreamedStep, image: wire.Image, out: list[n.Normalized]) -> None:
        """Emit an image; one in a thought is a draft."""
        step.media += 1
        if step.kind == "output":
            self._close_block(step, out)
        ordinal = self._take_ordinal()
        out += [
            n.BlockStart(ordinal, "image"),
            n.Image(ordinal, image.mime_type, image.data or "", final=True, draft=step.kind == "thought"),
            n.BlockStop(ordinal),
        ]

    def _sound(self, step: StreamedStep, audio: wire.Audio, out: list[n.Normalized]) -> None:
        """Collect a piece of sound; neighbouring pieces of one type are one block."""
        step.media += 1
        media_type = audio.mime_type
        for name, value in (("rate", audio.sample_rate or audio.rate), ("channels", audio.channels)):
            if value is not None and f"{name}=" not in media_type:
                media_type += f";{name}={value}"
        if not step.audio or (media_type and media_type != step.media_type):
            self._close_block(step, out)
            step.ordinal, step.audio, step.media_type = self._take_ordinal(), True, media_type
            out.append(n.BlockStart(step.ordinal, "audio"))
        self._hold_for(step, len(audio.data or "") + 64)
        step.pieces.append(audio.data or "")

    def _by_address(self, step: StreamedStep, data: bytes, out: list[n.Normalized]) -> None:
        """Emit other content as an item: a step of its own when it goes back."""
        step.media += 1
        self._close_block(step, out)
        content = read(wire.fields, data, "content")
        kind = text_of(content["type"]).strip('"')
        ordinal = self._take_ordinal()
        out.append(n.ItemStart(ordinal, f"{API}.{kind}"))
        self._end_item(ordinal, {"type": ['"model_output"'], "content": [f"[{data.decode()}]"]}, out)

    def _end_item(self, ordinal: int, fields: dict[str, list[str]], out: list[n.Normalized]) -> None:
        whole = {name: Raw(_joined(values)) for name, values in fields.items()}
        out += [n.ToolCallDelta(ordinal, msgspec.json.encode(whole).decode()), n.BlockStop(ordinal)]

    def _close_block(self, step: StreamedStep, out: list[n.Normalized]) -> None:
        """End the open block of an output."""
        if step.ordinal < 0:
            return
        if step.audio:
            out.append(n.Audio(step.ordinal, step.media_type, sound.joined(step.pieces)))
        elif step.pieces:
            out.append(n.Opaque(step.ordinal, "citations", f"[{','.join(step.pieces)}]"))
        out.append(n.BlockStop(step.ordinal))
        self._hold(-step.held)
        step.ordinal, step.audio, step.media_type, step.pieces, step.held = -1, False, "", [], 0

    def _sign(self, step: StreamedStep, signature: str | None, out: list[n.Normalized]) -> None:
        if signature and step.ordinal >= 0:
            out.append(n.Opaque(step.ordinal, "thought_signature", signature))

    def _extra(self, name: str, json: str, out: list[n.Normalized], block: int | None = None) -> None:
        out.append(n.Extra(f"{API}.{name}", json, block))

    def _hold_for(self, step: StreamedStep, size: int) -> None:
        self._hold(size)
        step.held += size


def _left_of(whole: wire.Step | wire.Other, streamed: StreamedStep) -> list[Raw]:
    """The entries of a step's content or summary that the stream lacked."""
    entries = (whole.content if isinstance(whole, wire.ModelOutput) else None) or []
    entries = (whole.summary if isinstance(whole, wire.Thought) else entries) or []
    texts: list[str] = []
    media: list[Raw] = []
    for entry in entries:
        piece, _ = wire.read_piece(bytes(entry))
        if isinstance(piece, wire.Text):
            texts.append(piece.text)
        else:
            media.append(entry)
    rest = streamed.emitted.rest("".join(texts)) if texts else ""
    text = [Raw(msgspec.json.encode({"type": "text", "text": rest}))] if rest else []
    return [*text, *media[streamed.media :]]


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's token counts. `reasoning` is in addition to `output`, not part of it."""
    return Usage(
        input=count(raw, "total_input_tokens"),
        output=count(raw, "total_output_tokens"),
        reasoning=count(raw, "total_thought_tokens"),
        cache_read=count(raw, "total_cached_tokens"),
        total=count(raw, "total_tokens"),
        raw=raw,
    )


def _joined(values: list[str]) -> str:
    """One list of several, or the only value."""
    return f"[{','.join(value[1:-1] for value in values)}]" if len(values) > 1 else values[0]

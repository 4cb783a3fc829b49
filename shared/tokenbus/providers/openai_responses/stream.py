"""Decodes Responses API responses, streamed or whole, into normalized events.

providers.md ("OpenAI Responses") describes real streams. Design choices:

- Each part of a message that has text is a text block. Each part of a reasoning summary or text is a thinking block;
  reasoning without parts is an empty block, because it may hold encrypted content.
- Text from deltas is final, even if the end of the part or item differs. If no delta came, the end of the part, item or
  response is emitted as one delta.
- A call keeps the id and name from its announcement. A custom tool's input is free text: it becomes the raw argument
  string unchanged and is not JSON.
- An item of any other type is emitted as its JSON, when it is complete. This includes custom tool calls that the
  provider runs itself. A text that such an item streams (code, arguments) is emitted first; its other events are
  dropped, because the complete item has their data.
- A refusal gives finish `content_filter`, for any status of the response.
- A cancelled response is an error: no client of ours cancels it this way.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import ItemKind, arguments_of, raw_key, summary_key, text_key, tools_of
from tokenbus.providers.openai_responses.output import OutputDecoder
from tokenbus.providers.openai_responses.request import ENDED
from tokenbus.providers.response.decoder import check_pieces, finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import is_null, read, text_of
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.unknown_fields import UnknownField, has_value, named, read_known
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, n.FinishReason] = {
    "completed": "stop",
    "incomplete:max_output_tokens": "length",
    "incomplete:content_filter": "content_filter",
    "incomplete:steered": "pause",
}
_FIELDS: dict[type[msgspec.Struct], str] = {wire.ArgumentsDelta: "arguments", wire.InputDelta: "input"}
_STREAMED = {
    "response.code_interpreter_call_code.delta": "code",
    "response.mcp_call_arguments.delta": "arguments",
    "response.apply_patch_call_operation_diff.delta": "operation.diff",
}
"""Fields of items that the provider runs, by the events that stream them. A dot: the field of an object."""
_OF_PROGRESS = {"type", "item_id", "output_index", "sequence_number"}


class ResponsesDecoder(OutputDecoder, kw_only=True):
    """One response of the Responses API; see `tokenbus.providers.api.Decoder`."""

    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return None
        parsed, unknown = wire.read_event(data)
        if unknown and not isinstance(parsed, wire.ItemEvent):
            whole = isinstance(parsed, wire.Response)
            self._note(named("openai-responses", unknown, "response" if whole else parsed))
        match parsed:
            case wire.ItemEvent():
                self._begin(None, out)
                self._item_event(parsed, out)
                if unknown:
                    self._of_event(parsed, unknown, out)
            case wire.Created() | wire.InProgress() | wire.Queued():
                self._begin(parsed.response, out)
            case wire.Completed() | wire.Incomplete() | wire.ResponseFailed() | wire.Cancelled():
                return self._end_of(parsed.response, str(parsed.__struct_config__.tag).removeprefix("response."), out)
            case wire.ErrorEvent():
                return n.Failed(provider_failure(read(wire.anything, data, "event")))
            case wire.Response():
                return self._whole(parsed, data, out)
            case wire.Unknown():
                self._unknown(parsed, data, out)
            case wire.KeepAlive() | wire.Ping():
                pass
        return None

    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        return cut_before("response.completed", began=self.started, content="response")

    # --- the response -----------------------------------------------------------------------------------------

    def _begin(self, response: wire.Response | None, out: list[n.Normalized]) -> None:
        if self.started:
            return
        self.started = True
        response = response or wire.Response()
        out.append(n.Start(response.model or "", response.id or ""))
        if not is_null(response.tools) and (tools := tools_of(response.tools)) is not None:
            self.custom_tools = [tool.name for tool in tools if tool.type == "custom"]
            self.image_model = next((tool.model or "" for tool in tools if tool.type == "image_generation"), "")

    def _whole(self, response: wire.Response, data: bytes, out: list[n.Normalized]) -> n.Terminal:
        """Handle a non-streamed response, or an error without a type, as gateways in front of the API send it."""
        if response.object == "response":
            return self._end_of(response, "", out)
        if response.error:
            return n.Failed(provider_failure(read(wire.anything, data, "event")))
        raise Malformed("event", "neither a type nor a response")

    def _end_of(self, response: wire.Response, event_status: str, out: list[n.Normalized]) -> n.Terminal:
        """Handle the final response. ``event_status``: the status in the event's name."""
        check_pieces(len(response.output or ()))  # before each is read
        self._begin(response, out)
        if has_value(response.service_tier):
            self._note({"openai-responses.service_tier": text_of(response.service_tier)})
        status = response.status if response.status in ENDED else event_status or response.status
        if status in ("completed", "incomplete"):
            self._complete(response.output or [], out)
        usage = usage_of(latest(None, response.usage)) if response.usage else None
        if usage:
            out.append(n.UsageSeen(usage))
        if status == "failed":
            return n.Failed(provider_failure(response.error or {"code": "response_failed"}))
        if status == "cancelled":
            return n.Failed(ErrorInfo(code="cancelled", kind="unknown", message="the response was cancelled"))
        if status == "expired":
            # A new job would wait as long.
            return n.Failed(ErrorInfo(code="job_expired", kind="timeout", message="the job did not run in its time"))
        if status not in ENDED:
            return n.Cut(f"the response is not complete (status: {status or 'missing'})")
        reason = response.incomplete_details and response.incomplete_details.reason
        raw_finish = f"{status}:{reason}" if reason else status or ""
        finish = "content_filter" if self.refused else FINISH.get(raw_finish, "unknown")
        if finish == "stop" and self.waiting:
            return n.Done("requires_action", raw_finish, usage)
        return n.Done(finish_of(finish, self.calls + self.asked), raw_finish, usage)

    # --- its items --------------------------------------------------------------------------------------------

    def _item_event(self, parsed: wire.ItemEvent, out: list[n.Normalized]) -> None:
        """Handle an event about an item."""
        index = parsed.output_index
        match parsed:
            case wire.TextDelta():
                self._text(parsed, text_key(parsed.content_index), "text", parsed.delta, out)
                if parsed.logprobs is not wire.NOTHING and has_value(parsed.logprobs):
                    self._logprobs(self._content_item(parsed, "text", out), parsed.logprobs, out)
            case wire.SummaryDelta():
                self._text(parsed, summary_key(parsed.summary_index), "thinking", parsed.delta, out)
            case wire.ReasoningDelta():
                self._text(parsed, raw_key(parsed.content_index), "thinking", parsed.delta, out)
            case wire.RefusalDelta():
                self._refuse(self._content_item(parsed, "text", out), text_key(parsed.content_index), parsed.delta, out)
            case wire.ArgumentsDelta() | wire.InputDelta():
                if (item := self._call_of(parsed, out)) is None:
                    self._item_input(parsed.output_index, parsed.item_id, _FIELDS[type(parsed)], parsed.delta, out)
                else:
                    if item.ended:
                        raise Malformed("event", f"the call at output_index {index} has ended")
                    self._emit_arguments(item, parsed.delta, out)
            case wire.ItemAdded():
                self._announce(index, bytes(parsed.item), out)
            case wire.ItemDone():
                self._end_item(index, bytes(parsed.item), out)
            case wire.AnnotationAdded():
                self._annotation(parsed, out)
            case wire.PartialImage():
                at = self.table.of_delta("image", index, parsed.item_id)
                if at is not None and at in self.table.open:
                    self._preview(self.table.items[at], parsed, out)
            case _:
                self._part_event(parsed, out)

    def _of_event(self, parsed: wire.ItemEvent, unknown: list[UnknownField], out: list[n.Normalized]) -> None:
        """Emit an event's fields without a meaning here: with its item's block, if that is open."""
        known = self.table.by_id.get(parsed.item_id or "", self.table.by_index.get(parsed.output_index or 0))
        block = self._present_block(self.table.items[known]) if known in self.table.open else None
        self._beside(named("openai-responses", unknown, parsed), block, out)

    def _part_event(self, parsed: wire.ItemEvent, out: list[n.Normalized]) -> None:
        """Handle the end of a part, which repeats it. Citations may follow a text before its part ends."""
        match parsed:
            case wire.TextDone():
                self._part_text(parsed, text_key(parsed.content_index), "text", parsed.text, out)
            case wire.RefusalDone():
                self._part_text(parsed, text_key(parsed.content_index), "text", parsed.refusal, out, refusal=True)
            case wire.SummaryDone():
                self._part_text(parsed, summary_key(parsed.summary_index), "thinking", parsed.text, out)
            case wire.ReasoningDone():
                self._part_text(parsed, raw_key(parsed.content_index), "thinking", parsed.text, out)
            case wire.PartDone():
                message, reasoning = self._item_of(parsed, "message"), self._item_of(parsed, "reasoning")
                if message is None and reasoning is not None:
                    self._part_done(reasoning, raw_key(parsed.content_index), "thinking", parsed.part, out)
                else:
                    self._part_done(message, text_key(parsed.content_index), "text", parsed.part, out)
            case wire.SummaryPartDone():
                at = self._item_of(parsed, "reasoning")
                self._part_done(at, summary_key(parsed.summary_index), "thinking", parsed.part, out)
            case wire.ArgumentsDone() | wire.InputDone():
                if (item := self._call_of(parsed, out)) and not item.ended:
                    self._emit_arguments(item, item.emitted.rest(arguments_of(parsed)) or "", out)
            case _:
                pass  # the start of a part means nothing before its content

    def _item_of(self, parsed: wire.ItemEvent, kind: ItemKind) -> int | None:
        """Return the open item of this kind that an event refers to."""
        at = self.table.of_delta(kind, parsed.output_index, parsed.item_id)
        return at if at in self.table.open else None

    def _part_text(
        self,
        parsed: wire.ItemEvent,
        key: str,
        kind: n.OpenKind,
        whole: str,
        out: list[n.Normalized],
        *,
        refusal: bool = False,
    ) -> None:
        """Process the full text of a part. For an item that has ended, nothing is new."""
        at = self.table.of_delta("message" if kind == "text" else "reasoning", parsed.output_index, parsed.item_id)
        if at is None or at in self.table.open or self.table.items[at].again is not None:
            self._end_part(self._content_item(parsed, kind, out), key, kind, whole, out, event="text", refusal=refusal)

    def _part_done(
        self, at: int | None, key: str, kind: n.OpenKind, data: msgspec.Raw, out: list[n.Normalized]
    ) -> None:
        """Process the final form of a part. Its block ends with its item, because data to send back comes only then."""
        if at is not None and not is_null(data):
            part, unknown = read_known(wire.content_part, wire.ContentPart, bytes(data), "part")
            self._beside(named("openai-responses", unknown, "part"), self._present_block(self.table.items[at]), out)
            if whole := part.refusal or part.text:
                self._end_part(self.table.items[at], key, kind, whole, out, event="part", refusal=bool(part.refusal))

    def _text(self, parsed: wire.ItemEvent, key: str, kind: n.OpenKind, text: str, out: list[n.Normalized]) -> None:
        self._emit_text(self._content_item(parsed, kind, out), key, kind, text, out)

    def _annotation(self, parsed: wire.AnnotationAdded, out: list[n.Normalized]) -> None:
        at = self.table.of_delta("message", parsed.output_index, parsed.item_id)
        if at is not None and at not in self.table.open:
            self._extra("annotation", text_of(parsed.annotation), out)
        else:
            self._cite(self._content_item(parsed, "text", out), text_key(parsed.content_index), parsed.annotation, out)

    def _unknown(self, parsed: wire.Unknown, data: bytes, out: list[n.Normalized]) -> None:
        """Handle an event of unknown type. Drop it if it concerns an item, whose final form has all data."""
        index = parsed.output_index
        of_item = isinstance(parsed.item_id, str) or (isinstance(index, int) and index in self.table.by_index)
        if of_item and (pieces := _pieces_of(parsed)):
            for field, piece in pieces:
                self._item_input(index, parsed.item_id, field, piece, out)
        elif of_item:
            self._progress(parsed, data, out)
        elif self.started:
            self._extra(parsed.type.removeprefix("response."), data.decode(), out)

    def _progress(self, parsed: wire.Unknown, data: bytes, out: list[n.Normalized]) -> None:
        """Emit what an event says of an item that the provider runs: its state, or data that come before its end. The
        complete item repeats what an event ``.added`` or ``.done`` has.
        """
        at = self.table.by_id.get(parsed.item_id) if isinstance(parsed.item_id, str) else None
        at = self.table.by_index.get(parsed.output_index) if at is None and isinstance(parsed.output_index, int) else at
        name = parsed.type.removeprefix("response.")
        step = name.rpartition(".")[2]
        if at not in self.table.open or (item := self.table.items[at]).ordinal < 0 or step in ("added", "done"):
            return
        if item.kind in ("image", "other"):
            out.append(n.ItemProgress(item.ordinal, name if step == "delta" else step))
        if read(wire.fields, data, "event").keys() - _OF_PROGRESS:
            self._extra(name, data.decode(), out, item.ordinal)

    def _item_input(self, index: object, item_id: object, field: str, piece: str, out: list[n.Normalized]) -> None:
        """Handle a piece of a text that an item of the provider's streams."""
        known = self.table.by_id.get(item_id) if isinstance(item_id, str) else None
        at = self.table.by_index.get(index) if known is None and isinstance(index, int) else known
        if at in self.table.open and (item := self.table.items[at]).kind == "other":
            self._emit_input(item, field, piece, out)


def _pieces_of(parsed: wire.Unknown) -> list[tuple[str, str]]:
    """The pieces of an item's text that an event brings, each with its field."""
    place = parsed.command_index if isinstance(parsed.command_index, int) else 0
    printed: Any = parsed.delta
    if isinstance(printed, dict) and parsed.type == "response.shell_call_output_content.delta":
        texts = cast("dict[str, object]", printed).items()
        return [(f"output.{place}.{name}", piece) for name, piece in texts if isinstance(piece, str)]
    field = f"action.commands.{place}" if parsed.type == "response.shell_call_command.delta" else ""
    field = field or _STREAMED.get(parsed.type, "")
    return [(field, printed)] if field and isinstance(printed, str) else []


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's token counts. As in the API, `output` includes reasoning and `input` includes cached tokens."""
    return Usage(
        input=count(raw, "input_tokens"),
        output=count(raw, "output_tokens"),
        reasoning=count(raw, "output_tokens_details", "reasoning_tokens"),
        cache_read=count(raw, "input_tokens_details", "cached_tokens"),
        cache_write=count(raw, "input_tokens_details", "cache_write_tokens"),
        total=count(raw, "total_tokens"),
        raw=raw,
    )

"""The answer of the Responses API, streamed or whole, as normalised events.

What providers.md ("OpenAI Responses") says of real streams holds here. Choices of our own:

- A part of a message is a text block, and none where it has no text. Each part of a reasoning's summary or text is a
  thinking block, and a reasoning without any is an empty one: it may hold encrypted content.
- What deltas said stands, and is not held against what the end of its part or item says. Where no delta came, the end
  of the part, the item or the response is taken, as one delta.
- A call's id and name are those with which its item was announced. A custom tool's input is free text: it is the raw
  argument string as it came, no JSON.
- An item of any other type, a custom tool's call that the provider runs itself included, is an `Extra` with an ordinal,
  told when it is complete. Events on its way are nothing of their own: the complete item holds what they brought.
- A refusal ends in finish `content_filter`, whatever the response's status says.
- A response that was cancelled is an error: nobody who waits for it did that.
"""

from __future__ import annotations

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import (
    Cut,
    Done,
    Failed,
    FinishReason,
    Normalized,
    OpenKind,
    Start,
    Terminal,
    UsageSeen,
)
from tokenbus.events.usage import Usage
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import ItemKind, arguments_of, raw_key, summary_key, text_key, tools_of
from tokenbus.providers.openai_responses.output import OutputDecoder
from tokenbus.providers.response.decoder import finish_of
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import is_null, read, text_of
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, FinishReason] = {
    "completed": "stop",
    "incomplete:max_output_tokens": "length",
    "incomplete:content_filter": "content_filter",
}
_ENDED = ("completed", "incomplete", "failed", "cancelled")


class ResponsesDecoder(OutputDecoder, kw_only=True):
    """One response of the Responses API; see `tokenbus.providers.api.Decoder`."""

    started: bool = False

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return None
        said = wire.read_event(data)
        match said:
            case wire.OfItem():
                self._begin(None, out)
                self._of_item(said, out)
            case wire.Created() | wire.InProgress() | wire.Queued():
                self._begin(said.response, out)
            case wire.Completed() | wire.Incomplete() | wire.ResponseFailed() | wire.Cancelled():
                return self._end_of(said.response, str(said.__struct_config__.tag).removeprefix("response."), out)
            case wire.ErrorEvent():
                return Failed(provider_failure(read(wire.anything, data, "event")))
            case wire.Response():
                return self._whole(said, data, out)
            case wire.Unknown():
                self._unknown(said, data, out)
            case wire.KeepAlive() | wire.Ping():
                pass
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        return Cut("the stream ended before response.completed" if self.started else "the body held no response")

    # --- the response -----------------------------------------------------------------------------------------

    def _begin(self, response: wire.Response | None, out: list[Normalized]) -> None:
        if self.started:
            return
        self.started = True
        response = response or wire.Response()
        out.append(Start(response.model or "", response.id or ""))
        if not is_null(response.tools) and (tools := tools_of(response.tools)) is not None:
            self.custom_tools = [tool.name for tool in tools if tool.type == "custom"]
            self.image_model = next((tool.model or "" for tool in tools if tool.type == "image_generation"), "")

    def _whole(self, response: wire.Response, data: bytes, out: list[Normalized]) -> Terminal:
        """A response that was not streamed; or an error without a type, as gateways before the API write it."""
        if response.object == "response":
            return self._end_of(response, "", out)
        if response.error:
            return Failed(provider_failure(read(wire.anything, data, "event")))
        raise Malformed("event", "it has no type, and is no response")

    def _end_of(self, response: wire.Response, said: str, out: list[Normalized]) -> Terminal:
        """The response as it is at its end; ``said``: its status in the name of the event."""
        self._begin(response, out)
        status = response.status if response.status in _ENDED else said or response.status
        if status in ("completed", "incomplete"):
            self._complete(response.output or [], out)
        usage = usage_of(latest(None, response.usage)) if response.usage else None
        if usage:
            out.append(UsageSeen(usage))
        if status == "failed":
            return Failed(provider_failure(response.error or {"code": "response_failed"}))
        if status == "cancelled":
            return Failed(ErrorInfo(code="cancelled", kind="unknown", message="the response was cancelled"))
        if status not in _ENDED:
            return Cut(f"the response is {status or 'without a status'}, and not complete")
        reason = response.incomplete_details and response.incomplete_details.reason
        raw_finish = f"{status}:{reason}" if reason else status or ""
        finish = "content_filter" if self.refused else FINISH.get(raw_finish, "unknown")
        return Done(finish_of(finish, self.calls), raw_finish, usage)

    # --- its items --------------------------------------------------------------------------------------------

    def _of_item(self, said: wire.OfItem, out: list[Normalized]) -> None:
        """An event about an item."""
        index = said.output_index
        match said:
            case wire.TextDelta():
                self._text(said, text_key(said.content_index), "text", said.delta, out)
            case wire.SummaryDelta():
                self._text(said, summary_key(said.summary_index), "thinking", said.delta, out)
            case wire.ReasoningDelta():
                self._text(said, raw_key(said.content_index), "thinking", said.delta, out)
            case wire.RefusalDelta():
                self._refuse(self._content_item(said, "text", out), text_key(said.content_index), said.delta, out)
            case wire.ArgumentsDelta() | wire.InputDelta():
                if item := self._call_of(said, out):
                    if item.ended:
                        raise Malformed("event", f"the call at output_index {index} has ended")
                    self._argue(item, said.delta, out)
            case wire.ItemAdded():
                self._announce(index, bytes(said.item), out)
            case wire.ItemDone():
                self._end_item(index, bytes(said.item), out)
            case wire.AnnotationAdded():
                self._annotation(said, out)
            case wire.PartialImage():
                at = self.table.of_delta("image", index, said.item_id)
                if at is not None and at in self.table.open:
                    self._preview(self.table.items[at], said, out)
            case _:
                self._of_part(said, out)

    def _of_part(self, said: wire.OfItem, out: list[Normalized]) -> None:
        """The end of a part, which says it again. Citations may follow a text before its part ends."""
        match said:
            case wire.TextDone():
                self._part_text(said, text_key(said.content_index), "text", said.text, out)
            case wire.RefusalDone():
                self._part_text(said, text_key(said.content_index), "text", said.refusal, out, refusal=True)
            case wire.SummaryDone():
                self._part_text(said, summary_key(said.summary_index), "thinking", said.text, out)
            case wire.ReasoningDone():
                self._part_text(said, raw_key(said.content_index), "thinking", said.text, out)
            case wire.PartDone():
                message, reasoning = self._item_of(said, "message"), self._item_of(said, "reasoning")
                if message is None and reasoning is not None:
                    self._part_done(reasoning, raw_key(said.content_index), "thinking", said.part, out)
                else:
                    self._part_done(message, text_key(said.content_index), "text", said.part, out)
            case wire.SummaryPartDone():
                at = self._item_of(said, "reasoning")
                self._part_done(at, summary_key(said.summary_index), "thinking", said.part, out)
            case wire.ArgumentsDone() | wire.InputDone():
                if (item := self._call_of(said, out)) and not item.ended:
                    self._argue(item, item.told.rest(arguments_of(said)) or "", out)
            case _:
                pass  # a part begins, which is nothing before its content

    def _item_of(self, said: wire.OfItem, kind: ItemKind) -> int | None:
        """The open item of this kind that an event is about."""
        at = self.table.of_delta(kind, said.output_index, said.item_id)
        return at if at in self.table.open else None

    def _part_text(
        self, said: wire.OfItem, key: str, kind: OpenKind, whole: str, out: list[Normalized], *, refusal: bool = False
    ) -> None:
        """The whole text of a part whose item has not ended; of one that has, nothing is new."""
        at = self.table.of_delta("message" if kind == "text" else "reasoning", said.output_index, said.item_id)
        if at is None or at in self.table.open or self.table.items[at].again is not None:
            self._end_part(self._content_item(said, kind, out), key, kind, whole, out, refusal=refusal)

    def _part_done(self, at: int | None, key: str, kind: OpenKind, data: msgspec.Raw, out: list[Normalized]) -> None:
        """A part as it is at its end. Its block ends with its item: what must go back with it comes no earlier."""
        if at is not None and not is_null(data):
            part = read(wire.content_part, bytes(data), "part")
            if whole := part.refusal or part.text:
                self._end_part(self.table.items[at], key, kind, whole, out, refusal=bool(part.refusal))

    def _text(self, said: wire.OfItem, key: str, kind: OpenKind, text: str, out: list[Normalized]) -> None:
        self._say(self._content_item(said, kind, out), key, kind, text, out)

    def _annotation(self, said: wire.AnnotationAdded, out: list[Normalized]) -> None:
        at = self.table.of_delta("message", said.output_index, said.item_id)
        if at is not None and at not in self.table.open:
            self._extra("annotation", text_of(said.annotation), out)
        else:
            self._cite(self._content_item(said, "text", out), text_key(said.content_index), said.annotation, out)

    def _unknown(self, said: wire.Unknown, data: bytes, out: list[Normalized]) -> None:
        """An event of no known type is nothing of its own on the way of an item, which tells all at its end."""
        index = said.output_index
        of_item = isinstance(said.item_id, str) or (isinstance(index, int) and index in self.table.by_index)
        if self.started and not of_item:
            self._extra(said.type.removeprefix("response."), data.decode(), out)


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's counts. `output` includes the reasoning and `input` the caches, as the API has it."""
    return Usage(
        input=count(raw, "input_tokens"),
        output=count(raw, "output_tokens"),
        reasoning=count(raw, "output_tokens_details", "reasoning_tokens"),
        cache_read=count(raw, "input_tokens_details", "cached_tokens"),
        cache_write=count(raw, "input_tokens_details", "cache_write_tokens"),
        total=count(raw, "total_tokens"),
        raw=raw,
    )

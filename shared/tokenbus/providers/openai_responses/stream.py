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
from tokenbus.events.failure import ErrorInfo
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
from tokenbus.providers.decoding import finish_of
from tokenbus.providers.failures import provider_failure
from tokenbus.providers.json_reading import is_null, read, text_of
from tokenbus.providers.openai_responses import wire
from tokenbus.providers.openai_responses.items import arguments_of, raw_key, summary_key, text_key, tools_of
from tokenbus.providers.openai_responses.output import OutputDecoder
from tokenbus.providers.sse import SseEvent
from tokenbus.providers.usage_counts import count, latest

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

    def _complete(self, output: list[msgspec.Raw], out: list[Normalized]) -> None:
        """Items that were announced and not ended, or all where none was, are as the response at its end has them."""
        if not self.items and not self.ended_items:
            for index, item in enumerate(output):
                self._end_item(index, bytes(item), out)
        for index, item in list(self.items.items()):
            if index < len(output) and wire.read_item(bytes(output[index])).type == item.type:
                self._end_item(index, bytes(output[index]), out)
        self._give_up_items(out)

    # --- its items --------------------------------------------------------------------------------------------

    def _of_item(self, said: wire.OfItem, out: list[Normalized]) -> None:
        """An event about an item. What ends a part that has ended already is nothing."""
        index = said.output_index
        match said:
            case wire.TextDelta():
                self._text(index, text_key(said.content_index), "text", said.delta, out)
            case wire.SummaryDelta():
                self._text(index, summary_key(said.summary_index), "thinking", said.delta, out)
            case wire.ReasoningDelta():
                self._text(index, raw_key(said.content_index), "thinking", said.delta, out)
            case wire.RefusalDelta():
                self._refuse(self._content_item(index, "text", out), text_key(said.content_index), said.delta, out)
            case wire.ArgumentsDelta() | wire.InputDelta():
                self._argue(index, said.delta, out)
            case wire.ItemAdded():
                self._announce(index, bytes(said.item), out)
            case wire.ItemDone():
                self._end_item(index, bytes(said.item), out)
            case wire.AnnotationAdded():
                self._annotation(said, out)
            case wire.PartialImage():
                item = self.items.get(index)
                if item and item.kind == "image":
                    self._preview(item, said, out)
            case _ if index not in self.ended_items:
                self._of_part(said, out)
            case _:
                pass

    def _of_part(self, said: wire.OfItem, out: list[Normalized]) -> None:
        """The end of a part: its text, where no delta brought it. Citations may follow a text before its part ends."""
        index = said.output_index
        item = self.items.get(index)
        seen = item.seen if item else []
        match said:
            case wire.TextDone():
                if (key := text_key(said.content_index)) not in seen:
                    self._text(index, key, "text", said.text, out)
            case wire.RefusalDone():
                if (key := text_key(said.content_index)) not in seen:
                    self._refuse(self._content_item(index, "text", out), key, said.refusal, out)
            case wire.SummaryDone():
                if (key := summary_key(said.summary_index)) not in seen:
                    self._text(index, key, "thinking", said.text, out)
            case wire.ReasoningDone():
                if (key := raw_key(said.content_index)) not in seen:
                    self._text(index, key, "thinking", said.text, out)
            case wire.PartDone() if item:
                key_of = raw_key if item.kind == "reasoning" else text_key
                self._close_part(item, key_of(said.content_index), out)
            case wire.SummaryPartDone() if item:
                self._close_part(item, summary_key(said.summary_index), out)
            case wire.ArgumentsDone() | wire.InputDone() if item and not item.streamed:
                whole = said.input if isinstance(said, wire.InputDone) else arguments_of(said.arguments)
                self._argue(index, whole, out)
            case _:
                pass  # a part begins, which is nothing before its content

    def _text(self, index: int, key: str, kind: OpenKind, text: str, out: list[Normalized]) -> None:
        self._say(self._content_item(index, kind, out), key, kind, text, out)

    def _annotation(self, said: wire.AnnotationAdded, out: list[Normalized]) -> None:
        if said.output_index in self.ended_items:
            self._extra("annotation", text_of(said.annotation), out)
        else:
            item = self._content_item(said.output_index, "text", out)
            self._cite(item, text_key(said.content_index), said.annotation, out)

    def _unknown(self, said: wire.Unknown, data: bytes, out: list[Normalized]) -> None:
        """An event of no known type is nothing of its own on the way of an item, which tells all at its end."""
        index = said.output_index
        of_item = isinstance(index, int) and (index in self.items or index in self.ended_items)
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

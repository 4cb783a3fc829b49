"""Acme's API: `POST /talk` with lines of who said what; it answers with server-sent events, each one JSON object:

data: {"text": "Hel"}                                        a piece of the answer
data: {"call": {"id": "c1", "name": "weather", "input": {}}}  a tool call, always whole
data: {"error": {"type": "overloaded", "message": "…"}}       the end, and nothing of it is to be relied on
data: {"end": "done", "in": 12, "out": 34}                    the end
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tokenbus.providers import (
    BlockStart,
    BlockStop,
    Built,
    Cut,
    Done,
    Failed,
    Format,
    Generate,
    HttpCall,
    Malformed,
    MediaLimits,
    Message,
    Mode,
    Normalized,
    ProviderBase,
    Quirks,
    RequestInvalid,
    ResponseDecoder,
    SseEvent,
    Start,
    Takes,
    Terminal,
    TextDelta,
    TextPart,
    ToolCallDelta,
    ToolCallDone,
    ToolCallPart,
    ToolCallStart,
    ToolResultPart,
    Usage,
    conversation,
    finish_of,
    provider_failure,
    schema_of,
    with_extra,
)


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """The call for the next turn: pure. Raises RequestInvalid for what Acme cannot take."""
    messages, notes = conversation(request, history, Takes(api="acme", unique_ids=True))
    lines: list[dict[str, object]] = []
    for message in messages:
        for i, part in enumerate(message.parts):
            match part:
                case TextPart():
                    lines.append({"who": message.role, "text": part.text})
                case ToolCallPart():
                    lines.append({"who": message.role, "call": part.tool_id, "name": part.tool_name})
                case ToolResultPart(content=str(content)):
                    lines.append({"who": "tool", "call": part.tool_id, "text": content})
                case _:
                    raise RequestInvalid(f"{message.where}.content[{i}]", "Acme reads text alone")
    body: dict[str, object] = {"model": request.model, "lines": lines, "stream": request.stream}
    if request.tools:
        body["tools"] = [{"name": tool.name, "input": schema_of(tool.parameters)} for tool in request.tools]
    if request.max_tokens:
        body["limit"] = request.max_tokens
    if "region" in quirks.options:  # `quirks.options` in the settings is the package's own
        body["region"] = quirks.options["region"]
    call = HttpCall(
        path="/talk",
        body=msgspec.json.encode(with_extra(body, request.extra)),
        headers={"content-type": "application/json"},
    )
    return Built(call=call, notes=notes)


class _Call(msgspec.Struct):
    id: str
    name: str
    input: msgspec.Raw


class _Data(msgspec.Struct):
    text: str = ""
    call: _Call | None = None
    error: dict[str, object] | None = None
    end: Literal["done", "full"] | None = None
    took: int | None = msgspec.field(name="in", default=None)
    gave: int | None = msgspec.field(name="out", default=None)


_data = msgspec.json.Decoder(_Data)


class AcmeDecoder(ResponseDecoder, kw_only=True):
    """`ResponseDecoder` does framing, errors by HTTP status, bounds and the single end. All state is in fields."""

    begun: bool = False
    blocks: int = 0
    text: int | None = None
    """The text block that is open."""
    calls: int = 0

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        try:
            data = _data.decode(event.data)
        except msgspec.ValidationError as e:
            raise Malformed("event", str(e)) from None
        if not self.begun:
            self.begun = True
            out.append(Start("acme"))
        if data.text:
            if self.text is None:
                self.text = self._block()
                out.append(BlockStart(self.text, "text"))
            out.append(TextDelta(self.text, data.text))
        if data.call:
            self._close_text(out)
            block = self._block()
            arguments = bytes(data.call.input).decode()
            out += [ToolCallStart(block, data.call.id, data.call.name), ToolCallDelta(block, arguments)]
            out.append(ToolCallDone(block))
            self.calls += 1
        if data.error:
            return Failed(provider_failure({"error": data.error}))
        if data.end is None:
            return None
        self._close_text(out)
        finish = finish_of("stop" if data.end == "done" else "length", self.calls)
        return Done(finish, data.end, Usage(input=data.took, output=data.gave))

    def _closed(self, out: list[Normalized]) -> Terminal:
        return Cut("the stream ended before Acme's end")

    def _block(self) -> int:
        self.blocks += 1
        return self.blocks - 1

    def _close_text(self, out: list[Normalized]) -> None:
        if self.text is not None:
            out.append(BlockStop(self.text))
            self.text = None


class Acme(ProviderBase):
    """What tokenbus needs of a provider API. `ProviderBase` has the rest."""

    name = "acme"
    decodes = AcmeDecoder
    default_base_url = "https://api.acme.example/v1"
    default_key_env = "ACME_API_KEY"
    urgent = (b'"call"', b'"end"', b'"error"')
    formats: Mapping[Mode, Format] = {"chat": build}
    media = MediaLimits(image_types=(), document_types=())


provider = Acme()

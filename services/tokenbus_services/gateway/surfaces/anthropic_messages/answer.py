"""A run as one message of the Messages API, streamed and whole: however many turns it has, it is one message. Pure.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from tokenbus.client.response import Response
from tokenbus.core.run.blocks.public_blocks import arguments_object
from tokenbus.events import public
from tokenbus.events.normalized import FinishReason
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote, WholeRun, encode_line
from tokenbus_services.gateway.surfaces.errors import anthropic_error, anthropic_refusal
from tokenbus_services.gateway.surfaces.fields import pack_opaque
from tokenbus_services.gateway.surfaces.hosted import (
    Found,
    Output,
    Step,
    Steps,
    citations_of,
    is_own,
    late_citations,
    original,
)
from tokenbus_services.gateway.surfaces.owed_calls import OwedCall, OwedCalls
from tokenbus_services.gateway.surfaces.settling import Settling
from tokenbus_services.gateway.surfaces.surface import Echo
from tokenbus_services.pricing import token_counts

Json = dict[str, object]

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_use": "tool_use",
    "content_filter": "refusal",
    "pause": "pause_turn",
    "requires_action": "end_turn",
    "unknown": "end_turn",
    "error": "end_turn",
}
_OWN = {"signature", "redacted", "api", "provider"}
"""What a thinking block of the Messages API may have beside its text, and the origin."""


def ending(end: public.Completed, echo: Echo, *, owed: bool = False) -> Json:
    """Why the message ends. If calls of the bus's tools are left over, the API's word for its own tools applies.
    ``owed``: the client owes results.
    """
    if end.stop_string and end.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    reason = "pause_turn" if end.finish == "tool_use" and echo.bus_tools and not owed else _STOP_REASONS[end.finish]
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(end: public.Completed, echo: Echo) -> Json:
    """The run's counts."""
    counts = token_counts(end.usage, echo.api_of(end))
    usage: Json = {
        "input_tokens": counts.fresh,
        "cache_creation_input_tokens": counts.cache_write,
        "cache_read_input_tokens": counts.cache_read,
        "output_tokens": counts.output,
    }
    if counts.reasoning:
        usage["output_tokens_details"] = {"thinking_tokens": counts.reasoning}
    return usage


def signature_of(block: public.BlockComplete) -> str:
    """The signature of a thinking block; of another API, all that its provider wants back."""
    opaque = block.opaque or {}
    if not set(opaque) <= _OWN or opaque.get("api", "anthropic") != "anthropic":
        return pack_opaque({**opaque, **({"signature": block.signature} if block.signature else {})})
    return block.signature or opaque.get("signature", "")


def redacted_of(block: public.BlockComplete) -> str | None:
    """The data of a redacted thinking block of this API; None for any other block."""
    return None if block.content or block.signature else (block.opaque or {}).get("redacted")


def server_blocks(block: public.BlockComplete, steps: Steps) -> Iterator[Json]:
    """What the provider did itself: a block of Anthropic's servers as it wrote it, a step of another API's provider in
    this API's words, with the item itself in `tokenbus`.
    """
    step = steps.read(block)
    if is_own(block, "anthropic") and not block.cut:
        with suppress(msgspec.DecodeError, RecursionError):
            yield msgspec.json.decode(block.content or "", type=Json)
    elif step and step.tool in _CALLED:
        carried: Json = {"tokenbus": {"items": [original(block)]}}
        if step.called is not None:
            kind, name, given = _called(step)
            server: Json = {"server_name": step.server} if step.tool == "mcp" else {}
            yield {"type": kind, "id": step.id, "name": name, **server, "input": given, **carried}
            if step.output:
                carried = {"tokenbus": {"items": []}}  # the call has the item
        if step.output:
            yield {**_brought(step, step.output), "tool_use_id": step.id, **carried}


_CALLED = {
    "web_search": "web_search",
    "web_fetch": "web_fetch",
    "code": "code_execution",
    "shell": "bash_code_execution",
    "mcp": "",
}
"""This API's names of the tools that it has words for."""


def _called(step: Step) -> tuple[str, str, Json]:
    match step.tool:
        case "web_search":
            given: Json = {"query": ", ".join(step.queries)}
        case "web_fetch":
            given = {"url": step.url}
        case "code":
            given = {"code": step.code}
        case "shell":
            given = {"command": step.code}
        case _:
            return "mcp_tool_use", step.name, step.called or {}
    return "server_tool_use", _CALLED[step.tool], given


def _brought(step: Step, output: Output) -> Json:
    content: object
    match step.tool:
        case "web_search":
            empty: Json = {"encrypted_content": "", "page_age": None}
            content = [
                {"type": "web_search_result", "url": each.url, "title": each.title, **empty} for each in output.found
            ]
        case "web_fetch":
            page = next(iter(output.found), Found(url=step.url))
            source = {"type": "text", "media_type": "text/plain", "data": page.text}
            document = {"type": "document", "source": source, "title": page.title or None, "citations": None}
            content = {"type": "web_fetch_result", "url": page.url, "content": document, "retrieved_at": None}
        case "mcp":
            said = [{"type": "text", "text": output.errors or output.text, "citations": None}]
            return {"type": "mcp_tool_result", "is_error": output.failed, "content": said}
        case _:
            printed: Json = {"stdout": output.text, "stderr": output.errors, "return_code": output.exit_code}
            content = {"type": f"{_CALLED[step.tool]}_result", **printed, "content": []}
    return {"type": f"{_CALLED[step.tool]}_tool_result", "content": content}


def citations_in(block: public.BlockComplete) -> Iterator[Json]:
    """The sources of a text: as Anthropic wrote them; of another API those with an address, as results of a search."""
    for cited in citations_of(block):
        if own := cited.words_of("anthropic"):
            yield own
        elif cited.url:
            quote = cited.quote or (block.content or "")[cited.start : cited.end]
            about = {"url": cited.url, "title": cited.title or None, "cited_text": quote, "encrypted_index": ""}
            yield {"type": "web_search_result_location", **about}


def message_of(run: str, model: str, content: list[Json], **more: object) -> Json:
    return {
        "id": f"msg_{run}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        **more,
    }


class MessagesStream(Encoder):
    """Thinking and calls are sent once no retry can void them."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._run = run
        self._model = note.model
        self._echo = echo = msgspec.convert(note.echo, Echo)
        self._settling = Settling(hold_thinking=True, hold_calls=True, on_failure=echo.on_failure)
        self._open: dict[int, int] = {}
        """Place in the message's content of each open block of the run."""
        self._next = 0
        self._owed = OwedCalls()
        self._steps = Steps()

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        self._owed.feed(event)
        return [data for settled in self._settling.feed(event) for data in self._encode(settled)]

    def broken(self, problem: Problem) -> list[bytes]:
        return [b"event: error\ndata: %b\n\n" % anthropic_error(problem)]

    def _encode(self, event: public.PublicEvent) -> list[bytes]:
        match event:
            case public.Started():
                usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
                return [_event("message_start", message=message_of(self._run, self._model, [], usage=usage))]
            case public.BlockStarted():
                return self._start(event)
            case public.BlockComplete(kind="server_tool"):
                return self._whole(event)
            case public.Chunk():
                return self._delta(event)
            case public.BlockComplete():
                return self._stop(event)
            case public.Completed():
                owed = self._owed.calls
                how, usage = ending(event, self._echo, owed=bool(owed)), usage_of(event, self._echo)
                ended = _event("message_delta", delta=how, usage=usage, **_beside(event))
                called = [data for call in owed for data in self._owed_call(call)]
                return [*self._stop_cut_calls(), *called, ended, _event("message_stop")]
            case public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                return self.broken(of_end(event))
            case _:
                return []

    def _start(self, event: public.BlockStarted) -> list[bytes]:
        match event.kind:
            case "text" | "audio":  # this API has no sound: what it says is a text
                return [self._begin(event.block, {"type": "text", "text": ""})]
            case "tool_call" if not self._echo.bus_tools:
                call: Json = {"type": "tool_use", "id": event.tool_id, "name": event.tool_name, "input": {}}
                return [self._begin(event.block, call)]
            case _:
                return []  # thinking begins with its first piece: a redacted block has none

    def _begin(self, block: int, content: Json) -> bytes:
        self._open[block] = self._next
        self._next += 1
        return _event("content_block_start", index=self._open[block], content_block=content)

    def _delta(self, event: public.Chunk) -> list[bytes]:
        match event:
            case public.Chunk(kind="text" | "audio"):
                delta: Json = {"type": "text_delta", "text": event.text}
            case public.Chunk(kind="thinking"):
                begun = self._begin_thinking(event.block)
                return [*begun, self._changed(event.block, type="thinking_delta", thinking=event.text)]
            case public.Chunk(kind="tool_call", tool_call_part="input"):
                delta = {"type": "input_json_delta", "partial_json": event.text}
            case _:
                return []
        return [self._changed(event.block, **delta)] if event.block in self._open else []

    def _begin_thinking(self, block: int) -> list[bytes]:
        if block in self._open:
            return []
        return [self._begin(block, {"type": "thinking", "thinking": "", "signature": ""})]

    def _changed(self, block: int, **delta: object) -> bytes:
        return _event("content_block_delta", index=self._open[block], delta=delta)

    def _stop_cut_calls(self) -> list[bytes]:
        """A message that reached a limit ends in a call that is cut, as the API's own. After an error it has no end."""
        return [_event("content_block_stop", index=index) for index in self._open.values()]

    def _owed_call(self, call: OwedCall) -> list[bytes]:
        begun = self._begin(call.block, {**_owed(call), "input": {}})
        written = self._changed(call.block, type="input_json_delta", partial_json=encode_line(call.input).decode())
        return [begun, written, _event("content_block_stop", index=self._open.pop(call.block))]

    def _stop(self, event: public.BlockComplete) -> list[bytes]:
        if event.kind == "tool_call" and event.cut:
            return []
        out: list[bytes] = []
        if event.kind == "thinking":
            if event.block not in self._open and (data := redacted_of(event)):
                out.append(self._begin(event.block, {"type": "redacted_thinking", "data": data}))
            elif signature := signature_of(event):
                out += self._begin_thinking(event.block)
                out.append(self._changed(event.block, type="signature_delta", signature=signature))
        if event.kind == "text" and event.block in self._open:
            out += [self._changed(event.block, type="citations_delta", citation=each) for each in citations_in(event)]
        index = self._open.pop(event.block, None)
        return out if index is None else [*out, _event("content_block_stop", index=index)]

    def _whole(self, event: public.BlockComplete) -> list[bytes]:
        out: list[bytes] = []
        for content in server_blocks(event, self._steps):
            out += [self._begin(event.block, content), _event("content_block_stop", index=self._open.pop(event.block))]
        return out


def _beside(end: public.Completed) -> Json:
    late = late_citations(end)
    return {"tokenbus": late} if late else {}


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_line({"type": kind, **fields}))


def whole_message(note: GatewayNote, run: str) -> WholeRun:
    echo = msgspec.convert(note.echo, Echo)

    def body(response: Response, end: public.Completed, owed: Sequence[OwedCall]) -> Json:
        steps = Steps()
        content = [block for each in response.blocks for block in _content(each, echo, steps)]
        content += [_owed(call) for call in owed]
        ended = {**ending(end, echo, owed=bool(owed)), "usage": usage_of(end, echo), **_beside(end)}
        return message_of(run, note.model, content, **ended)

    return WholeRun(body, anthropic_refusal)


def _owed(call: OwedCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}


def _content(block: public.BlockComplete, echo: Echo, steps: Steps) -> Iterator[Json]:
    match block.kind:
        case "text" | "audio" if block.content:
            cited = list(citations_in(block))
            yield {"type": "text", "text": block.content, **({"citations": cited} if cited else {})}
        case "thinking":
            if data := redacted_of(block):
                yield {"type": "redacted_thinking", "data": data}
            elif block.content or signature_of(block):
                yield {"type": "thinking", "thinking": block.content or "", "signature": signature_of(block)}
        case "server_tool":
            yield from server_blocks(block, steps)
        case "tool_call" if not echo.bus_tools:
            yield {"type": "tool_use", "id": block.tool_id, "name": block.tool_name, "input": arguments_object(block)}
        case _:
            pass

"""Chat Completions as a stream of chunks, and as one body. Pure.

The rules are those of the official clients: the first delta has the role; a call's first delta alone has its id and
name; calls are numbered from 0 over the whole answer; one call per chunk; the usage chunk is the last before `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from tokenbus.client.response import Response
from tokenbus.events import public
from tokenbus.events.normalized import FinishReason
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote, WholeRun, encode_line
from tokenbus_services.gateway.surfaces.errors import openai_error, openai_refusal
from tokenbus_services.gateway.surfaces.hosted import Citation, citations_of
from tokenbus_services.gateway.surfaces.owed_calls import OwedCall, OwedCalls
from tokenbus_services.gateway.surfaces.settling import Settling
from tokenbus_services.gateway.surfaces.surface import Echo

DONE = b"data: [DONE]\n\n"


class ChatEcho(Echo, frozen=True, kw_only=True, omit_defaults=True):
    usage: bool = False
    """The stream ends with a chunk of token counts."""
    reasoning: bool = True
    """Thinking is sent as `reasoning_content`."""


def echo_of(note: GatewayNote) -> ChatEcho:
    """Read the note. A part that cannot be read counts as not requested."""
    try:
        return msgspec.convert(note.echo, ChatEcho)
    except msgspec.ValidationError:
        return ChatEcho()


class ChatEncoder(Encoder):
    """Encodes one run. Thinking is sent at once, because it comes back unsigned and is harmless. Calls are sent once no
    retry can void them."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._echo = echo = echo_of(note)
        self._settling = Settling(hold_thinking=False, hold_calls=True, on_failure=echo.on_failure)
        self._same = encode_line(_head(note, run, "chat.completion.chunk"))[:-1]
        self._role_sent = False
        self._calls: dict[int, int] = {}
        """Number of each call of the answer, by its block."""
        self._owed = OwedCalls()
        self._free_text: set[int] = set()
        """Blocks of calls whose input is no JSON."""
        self._whole_calls = False
        """The client has a call that it can run."""
        self._sent = 0
        """Characters of text so far."""
        self._begun_at: dict[int, int] = {}
        """Where the text of each block begins in that."""
        self._cited: list[dict[str, object]] = []
        self._text_of: int | None = None
        """The block whose text was sent last."""
        self._over = False

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        if self._over:
            return []
        self._owed.feed(event)
        out: list[bytes] = []
        for settled in self._settling.feed(event):
            out += self._encode(settled)
        if isinstance(event, public.TERMINAL):
            self._over = True
        return out

    def broken(self, problem: Problem) -> list[bytes]:
        if self._over:
            return []
        self._over = True
        return [_error_event(problem)]

    def _encode(self, event: public.PublicEvent) -> list[bytes]:
        match event:
            case public.Chunk(kind="text", visible=True, text=text) if text:
                out = [*self._role(), *self._seam(event)]
                self._begun_at.setdefault(event.block, self._sent)
                return [*out, self._text(text)]
            case public.Chunk(kind="audio", visible=True, text=text) if text:
                return [*self._role(), self._delta({"audio": {"transcript": text}})]
            case public.BlockComplete(kind="text"):
                self._cited += annotations_of(citations_of(event), self._begun_at.get(event.block, self._sent))
                return []
            case public.BlockComplete(kind="audio", audio=public.AudioRef() as audio) if not event.cut:
                # The id is sent once: clients join the texts of all deltas.
                return [*self._role(), self._delta({"audio": sound_of(event, audio)})]
            case public.Chunk(kind="thinking", text=text) if text and self._echo.reasoning:
                return [*self._role(), self._delta({"reasoning_content": text})]
            case public.BlockStarted(kind="tool_call", free_text=True):
                self._free_text.add(event.block)
                return []
            case public.Chunk(kind="tool_call", tool_call_part="input", text=text) if text and not self._echo.bus_tools:
                return self._arguments(event, text)
            case public.BlockComplete(kind="tool_call") if not self._echo.bus_tools and not event.cut:
                self._whole_calls = True
                # Clients parse the arguments as JSON.
                none = "" if event.free_text else "{}"
                return [] if event.block in self._calls else self._arguments(event, none)
            case public.Completed() | public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                return self._end(event)
            case _:
                return []

    def _role(self) -> list[bytes]:
        if self._role_sent:
            return []
        self._role_sent = True
        return [self._delta({"role": "assistant", "content": ""})]

    def _seam(self, event: public.Chunk) -> list[bytes]:
        """Texts of two turns of one answer are apart by a blank line, as in the run's own `text`."""
        before, self._text_of = self._text_of, event.turn
        return [self._text("\n\n")] if before is not None and before != event.turn else []

    def _arguments(self, event: public.Chunk | public.BlockComplete, text: str) -> list[bytes]:
        begun: list[bytes] = []
        if event.block not in self._calls:
            begun = self._call(event)
        piece = {"custom": {"input": text}} if event.block in self._free_text else {"function": {"arguments": text}}
        call = {"index": self._calls[event.block], **piece}
        return [*begun, self._delta({"tool_calls": [call]})]

    def _call(self, event: public.Chunk | public.BlockComplete) -> list[bytes]:
        # Do not announce a call before its first argument: if it is cut, the client could not run it.
        self._calls[event.block] = index = len(self._calls)
        call = {"index": index, **_call(event, "", free_text=event.block in self._free_text)}
        return [*self._role(), self._delta({"tool_calls": [call]})]

    def _owed_call(self, owed: OwedCall) -> list[bytes]:
        index = self._calls[owed.block] = len(self._calls)
        return [*self._role(), self._delta({"tool_calls": [{"index": index, **_owed(owed)}]})]

    def _end(self, end: public.TerminalEvent) -> list[bytes]:
        if not isinstance(end, public.Completed):
            return [_error_event(of_end(end))]
        owed = [call for each in self._owed.calls for call in self._owed_call(each)]
        finish = finish_of(end.finish, calls=self._whole_calls or bool(owed))
        cited = [*self._cited, *annotations_of(citations_of(end), self._sent)]
        # At once, as the API does: clients cannot add to a list whose entries have no index.
        sources = [self._delta({"annotations": cited})] if cited else []
        out = [*self._role(), *sources, *owed, self._delta({}, finish)]
        if self._echo.usage:
            out.append(self._chunk(b'"choices":[],"usage":' + encode_line(usage_object(end.usage))))
        return [*out, DONE]

    def _text(self, text: str) -> bytes:
        self._sent += len(text)
        return self._chunk(
            b'"choices":[{"index":0,"delta":{"content":' + encode_line(text) + b'},"finish_reason":null}]'
        )

    def _delta(self, delta: dict[str, object], finish: str | None = None) -> bytes:
        return self._chunk(b'"choices":' + encode_line([{"index": 0, "delta": delta, "finish_reason": finish}]))

    def _chunk(self, rest: bytes) -> bytes:
        return b"data: " + self._same + b"," + rest + b"}\n\n"


def whole_chat(note: GatewayNote, run: str) -> WholeRun:
    """Collects one run as one body."""
    echo = echo_of(note)

    def body(response: Response, end: public.Completed, owed: Sequence[OwedCall]) -> dict[str, object]:
        calls = [] if echo.bus_tools else [call for call in response.tool_calls if not call.cut]
        message: dict[str, object] = {"role": "assistant", "content": response.text, "refusal": None}
        if found := _annotations(response, end):
            message["annotations"] = found
        if sound := next((block for block in response.blocks if block.audio and not block.cut), None):
            message["content"] = None  # as this API has it: what the sound says is its transcript
            message["audio"] = {"transcript": response.text, **sound_of(sound, cast("public.AudioRef", sound.audio))}
        if echo.reasoning and response.thinking:
            message["reasoning_content"] = response.thinking
        if calls or owed:
            message["content"] = response.text or None
            message["tool_calls"] = [
                _call(call, call.arguments or ("" if call.free_text else "{}"), free_text=bool(call.free_text))
                for call in calls
            ] + [_owed(call) for call in owed]
        finish = finish_of(end.finish, calls=bool(calls or owed))
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return {**_head(note, run, "chat.completion"), "choices": [choice], "usage": usage_object(end.usage)}

    return WholeRun(body, openai_refusal)


def annotations_of(citations: list[Citation], at: int) -> list[dict[str, object]]:
    """The sources that have an address; this API has no word for others. ``at``: where their text begins."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "url": cited.url,
                "title": cited.title,
                "start_index": at + cited.start,
                "end_index": at + cited.end,
            },
        }
        for cited in citations
        if cited.url
    ]


def _annotations(response: Response, end: public.Completed) -> list[dict[str, object]]:
    """Those of all texts, which `Response.text` joins."""
    at, turn = 0, None
    found: list[dict[str, object]] = []
    for block in response.blocks:
        if block.kind == "text" and block.content:
            at += 2 if turn not in (None, block.turn) else 0
            turn = block.turn
            found += annotations_of(citations_of(block), at)
            at += len(block.content)
    return found + annotations_of(citations_of(end), at)


def sound_of(block: public.BlockComplete, audio: public.AudioRef) -> dict[str, object]:
    """A sound: its bytes if the events carry them, else the id of the blob, which the gateway serves."""
    known: dict[str, object] = {"id": audio.audio_id or f"audio_{block.run}_{block.block}"}
    known |= {"data": audio.base64 or "", "expires_at": audio.expires_at or 0}
    blob = {"tokenbus": {"blob_id": audio.blob_id, "media_type": audio.media_type}} if audio.blob_id else {}
    return {**known, **blob}


def _owed(call: OwedCall) -> dict[str, object]:
    kind, field = ("custom", "input") if call.free_text else ("function", "arguments")
    return {"id": call.id, "type": kind, kind: {"name": call.name, field: call.arguments}}


def _call(event: public.Chunk | public.BlockComplete, text: str, *, free_text: bool) -> dict[str, object]:
    called = event.tool_id or f"call_{event.block}"
    return _owed(
        OwedCall(id=called, block=event.block, name=event.tool_name or "", arguments=text, free_text=free_text)
    )


def _head(note: GatewayNote, run: str, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{run}", "object": kind, "created": note.created, "model": note.model}


def _error_event(problem: Problem) -> bytes:
    """A problem within a stream. No `[DONE]` follows: it would make the answer look whole."""
    return b"data: " + encode_line({"error": openai_error(problem)}) + b"\n\n"


def finish_of(finish: FinishReason, *, calls: bool) -> str:
    """The finish reason. ``calls``: the client has seen tool calls."""
    if finish in ("length", "content_filter"):
        return finish
    return "tool_calls" if calls else "stop"


def usage_object(usage: Usage | None) -> dict[str, object]:
    """Token counts. A count that the provider did not report is 0, because clients require numbers."""
    counts = usage or Usage()
    read, written = counts.input or 0, counts.output or 0
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": counts.total if counts.total is not None else read + written,
        "prompt_tokens_details": {"cached_tokens": counts.cache_read or 0},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
    }

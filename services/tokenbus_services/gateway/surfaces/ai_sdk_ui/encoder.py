"""Encodes a run as a UI message stream. Pure.

What a retry voids cannot be taken back in versions 5 and 6, so:

- A tool call's input is sent as it comes. The call becomes available to the client only once its turn is over, because
  the client may run it. If it becomes void, it ends as an error that says so. That error is the last of its step:
  clients that answer by themselves once all calls of a step have a result must not do so for a void call.
- Thinking is sent live. Its end, which has the signature, waits until the block is settled. If it becomes void, its
  end says so, and the request translator leaves it out of the history that the client sends back.
- Version 7 gets `reset-step` if a whole turn is void.

A block of thinking is settled by visible text in a later block: a retry voids only what comes after the text.
"""

from __future__ import annotations

from tokenbus.events import public
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ai_sdk_ui import parts
from tokenbus_services.gateway.surfaces.ai_sdk_ui.parts import DONE, ITEM, METADATA, VOID, Part, written
from tokenbus_services.gateway.surfaces.ai_sdk_ui.tool_parts import ToolParts
from tokenbus_services.gateway.surfaces.contract import Encoder, wait_name
from tokenbus_services.gateway.surfaces.errors import SENTENCES, sentence_of
from tokenbus_services.gateway.surfaces.hosted import Steps, citations_of, original

_CONTENT_EVENTS = (public.Chunk, public.BlockStarted, public.BlockComplete, public.ImagePreview, public.ToolProgress)


class UiStream(Encoder):
    """The encoder. ``ui``: major version of the client's `ai` package. ``bus_tools``: tools that the bus runs.
    ``client_tools``: those whose calls wait for the page. ``after``: the client has the run up to this seq.
    """

    def __init__(
        self,
        run: str,
        *,
        model: str,
        message_id: str,
        ui: int,
        bus_tools: frozenset[str],
        client_tools: frozenset[str] = frozenset(),
        after: int = -1,
    ) -> None:
        self._run = run
        self._model = model
        self._message_id = message_id
        self._v7 = ui >= 7
        self._after = after
        self._asks = ui >= 6
        self._tools = ToolParts(self._emit, bus_tools, client_tools)
        self._out: list[bytes] = []
        self._began = False
        self._ended = False
        self._turn: int | None = None
        self._in_step = False
        self._first_block: int | None = None
        """First block that the client got since the turn began, or was reset."""
        self._open: dict[int, str] = {}
        """Open text and reasoning parts, by block: `text` or `reasoning`."""
        self._steps = Steps()
        self._thoughts: dict[int, public.BlockComplete] = {}
        """Complete thinking that is not settled; its part is still open."""

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        if self._ended:
            return []
        if event.seq <= self._after:
            self._encode(event)
            if event.seq == self._after:
                self._tools.hand_over()
            self._out.clear()
            self._in_step = False
            return []
        self._begin()
        self._encode(event)
        return self._taken()

    def _encode(self, event: public.PublicEvent) -> None:
        if isinstance(event, _CONTENT_EVENTS):
            if event.turn != self._turn:
                self._next_turn(event.turn)
            if self._first_block is None:
                self._first_block = event.block
        match event:
            case public.BlockStarted():
                self._block_started(event)
            case public.Chunk():
                self._chunk(event)
            case public.BlockComplete():
                self._block_complete(event)
            case public.ImagePreview():
                if url := parts.media_url(self._run, event.image):
                    data = {"url": url, "index": event.index}
                    self._emit({"type": "data-image-preview", "id": str(event.block), "data": data, "transient": True})
            case public.ToolProgress():
                self._settle_turn()
                self._tools.progress(event)
            case public.Waiting():
                self._settle_turn()
                if event.what == "tool_result":
                    self._tools.ask_result(event.tool_id)
                elif event.what == "approval" and self._asks:
                    self._tools.ask_approval(event.tool_id, wait_name(self._run, event.wait))
            case public.Resumed(what="approval"):
                self._tools.decided(event, tells=self._asks)
            case public.Retrying() | public.Restarted():
                self._void(event)
            case public.UsageReported():
                self._settle_turn()
                self._emit({"type": "message-metadata", "messageMetadata": {"usage": parts.usage(event.total)}})
            case public.Completed() | public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                self._end(event)
            case _:  # Started is sent already; an event of a newer version
                pass

    def broken(self, problem: Problem) -> list[bytes]:
        if not self._ended:
            self._begin()
            self._close(void=True)
            self._emit({"type": "error", "errorText": sentence_of(problem)})
            self._finish("error")
        return self._taken()

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            metadata = {"run": self._run, "model": self._model}
            self._emit({"type": "start", "messageId": self._message_id, "messageMetadata": metadata})

    def _next_turn(self, turn: int) -> None:
        self._settle_turn()
        self._finish_step()
        self._start_step()
        self._turn = turn
        self._first_block = None

    def _finish_step(self) -> None:
        # Not with the end of the turn: version 5 wants a tool's output inside the step of its call.
        if self._in_step:
            self._in_step = False
            self._emit({"type": "finish-step"})

    def _start_step(self) -> None:
        self._in_step = True
        self._emit({"type": "start-step"})

    def _block_started(self, event: public.BlockStarted) -> None:
        match event.kind:
            case "text" | "audio":  # what a sound says is a text
                self._start(event.block, "text")
            case "thinking":
                self._start(event.block, "reasoning")
            case "tool_call":
                self._tools.begin(event)
            case _:
                pass

    def _start(self, block: int, kind: str) -> None:
        self._open[block] = kind
        self._emit({"type": f"{kind}-start", "id": str(block)})

    def _chunk(self, event: public.Chunk) -> None:
        if event.visible:
            self._settle_before(event.block)
        match event.kind:
            case "text" | "audio" | "thinking":
                kind = "reasoning" if event.kind == "thinking" else "text"
                if event.block not in self._open:
                    self._start(event.block, kind)
                self._emit({"type": f"{kind}-delta", "id": str(event.block), "delta": event.text})
            case "tool_call" if event.tool_call_part == "input":
                self._tools.add_input(event)
            case _:
                pass

    def _block_complete(self, event: public.BlockComplete) -> None:
        match event.kind:
            case "text" | "audio":
                if event.block in self._open:
                    self._stop(event.block, {} if event.kind == "audio" else parts.provider_metadata(event))
                if event.audio and not event.cut and (url := parts.media_url(self._run, event.audio)):
                    mark = {"providerMetadata": {METADATA: {"shown": True}}}
                    self._emit({"type": "file", "url": url, "mediaType": event.audio.media_type, **mark})
                self._cite(event)
            case "thinking":
                if event.block in self._open:
                    self._thoughts[event.block] = event
            case "tool_call":
                if not event.cut:
                    self._tools.complete(event)
            case "tool_result":
                self._settle_turn()
                self._tools.result(event)
            case "image":
                self._image(event)
            case "server_tool":
                if step := self._steps.read(event):
                    self._tools.hosted(step)
                if not event.cut:  # for the history that the client sends back
                    self._emit({"type": ITEM, "id": str(event.block), "data": original(event)})

    def _cite(self, event: public.BlockComplete | public.Completed) -> None:
        for number, cited in enumerate(citations_of(event)):
            block = event.block if isinstance(event, public.BlockComplete) else "answer"
            source: Part = {"sourceId": f"{self._run}:{block}:{number}"}
            if cited.url:
                self._emit({"type": "source-url", **source, "url": cited.url, "title": cited.title})
            else:
                document = {"mediaType": "application/octet-stream", "title": cited.title or cited.file_id}
                self._emit({"type": "source-document", **source, **document})

    def _image(self, event: public.BlockComplete) -> None:
        if event.image is None or event.cut or (event.image.draft and not self._v7):
            return
        if url := parts.media_url(self._run, event.image):
            kind = "reasoning-file" if event.image.draft else "file"
            metadata = parts.provider_metadata(event, blob_id=event.image.blob_id)
            self._emit({"type": kind, "url": url, "mediaType": event.image.media_type, **metadata})

    def _settle_before(self, block: int) -> None:
        """Visible text of ``block``: no retry voids what was thought before it."""
        for thought in [n for n in self._thoughts if n < block]:
            self._stop(thought, parts.provider_metadata(self._thoughts.pop(thought)))

    def _settle_turn(self) -> None:
        """The turn is over: its thinking is final, and its calls run."""
        for block in list(self._thoughts):
            self._stop(block, parts.provider_metadata(self._thoughts.pop(block)))
        self._tools.settle()

    def _void(self, event: public.Retrying | public.Restarted) -> None:
        self._emit({"type": "data-tokenbus", "data": _notice(event), "transient": True})
        if self._first_block is None:
            return
        self._tools.drop_from(event.drop_from)
        if self._v7 and event.drop_from <= self._first_block:
            self._emit({"type": "reset-step"})
            self._first_block = None
            self._open.clear()
            self._thoughts.clear()
            self._tools.forget_begun()
        elif self._stop_from(event.drop_from) and not self._open:
            self._finish_step()
            self._start_step()

    def _stop_from(self, first: int) -> bool:
        """End the open parts from a block on, as void; whether a call is among them."""
        for block in [n for n in self._open if n >= first]:
            self._thoughts.pop(block, None)
            self._stop(block, VOID)
        return self._tools.void_from(first)

    def _stop(self, block: int, metadata: Part) -> None:
        kind = self._open.pop(block)
        self._emit({"type": f"{kind}-end", "id": str(block), **metadata})

    def _close(self, *, void: bool) -> None:
        """End all open parts. ``void``: what is not settled does not stand."""
        if void:
            self._tools.drop_from(0)
        self._settle_turn()
        for block in [n for n, kind in self._open.items() if kind == "text"]:
            self._stop(block, {})
        self._stop_from(0)

    def _end(self, event: public.TerminalEvent) -> None:
        self._close(void=not isinstance(event, public.Completed))
        match event:
            case public.Completed():
                self._cite(event)
                self._tools.hand_over()
                self._finish_step()
                self._finish(parts.FINISH[event.finish], {"timing": event.timing})
            case public.Incomplete():
                self._emit({"type": "error", "errorText": parts.CUT})
                self._finish_step()
                self._finish("interrupted" if self._v7 else "other")
            case public.RunFailedEvent():
                self._emit({"type": "error", "errorText": SENTENCES[event.error.kind]})
                self._finish("error")
            case public.Cancelled():
                self._finish_step()
                self._emit({"type": "abort", **({"reason": event.reason} if event.reason else {})})
                self._done()

    def _finish(self, reason: str, metadata: Part | None = None) -> None:
        self._emit(
            {
                "type": "finish",
                "finishReason": reason,
                **({"messageMetadata": metadata} if metadata is not None else {}),
            }
        )
        self._done()

    def _done(self) -> None:
        self._out.append(DONE)
        self._ended = True

    def _emit(self, part: Part) -> None:
        self._out.append(written(part))

    def _taken(self) -> list[bytes]:
        out, self._out = self._out, []
        return out


def _notice(event: public.Retrying | public.Restarted) -> Part:
    """A retry as the client may know it, without the provider's raw error."""
    return {
        "type": "restarted" if isinstance(event, public.Restarted) else "retrying",
        "seq": event.seq,
        "code": event.error.code,
        "drop_from": event.drop_from,
        "next_attempt": event.next_attempt,
        "delay_ms": event.delay_ms,
        "continues": isinstance(event, public.Retrying) and bool(event.continues),
    }

"""Encodes a run as AG-UI events. Pure.

Everything is sent as it comes: what a retry voids is replaced by `MESSAGES_SNAPSHOT`, with the conversation that came
with the request and all content that is still valid. A client that joins gets a snapshot of what is on the log already,
then the beginnings of the open blocks, and the rest as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.events import public
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.problem import Problem, of_run
from tokenbus_services.gateway.surfaces.ag_ui.events import EventWriter, interrupt
from tokenbus_services.gateway.surfaces.ag_ui.history import Json, SentBlock, encrypted, messages_of
from tokenbus_services.gateway.surfaces.contract import Encoder
from tokenbus_services.gateway.surfaces.hosted import (
    Step,
    Steps,
    Tool,
    citation_value,
    citations_of,
    original,
    output_value,
)

RESULT = "tool_result"
"""What a run waits for that a message with the result decides; all else is an interrupt."""


class AgUiStream(Encoder):
    """The encoder. ``thread`` and ``client_run``: the client's ids. ``given``: the conversation of the request.

    ``join_at``: the last seq on the log when the client joined; -1 if it reads from the beginning. ``after``: the
    client has the run up to this seq.
    """

    def __init__(
        self,
        run: str,
        *,
        thread: str,
        client_run: str,
        given: Sequence[Json],
        model: str,
        join_at: int = -1,
        after: int = -1,
    ) -> None:
        self._run = run
        self._given = given
        self._join_at = join_at
        self._after = after
        self._waits: dict[str, public.Waiting] = {}
        """What the run waits for."""
        self._events = EventWriter(run, thread=thread, client_run=client_run, model=model)
        self._blocks: dict[int, SentBlock] = {}
        self._void_thinking: list[SentBlock] = []
        """A client that joins may have them from an earlier stream."""
        self._steps = Steps()
        self._activities: dict[str, tuple[int, Tool, Json]] = {}
        """What the provider did itself, by the activity's id: the block of the call, the tool, the content."""
        self._items: dict[int, Json] = {}
        """The provider's items that no message has yet, by their block."""
        self._turn: int | None = None
        self._began = False
        self._ended = False

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        if self._ended:
            return []
        self._events.seq = event.seq
        if event.seq <= self._after:
            self._emit_event(event)
            if event.seq == self._after:
                self._close_all()
            self._events.discard()
            return []
        if event.seq > self._join_at:
            self._begin()
            self._emit_event(event)
            return self._events.taken()
        if event.seq == self._join_at and isinstance(event, public.TerminalEvent):
            self._join()
            self._emit_event(event)
            return self._events.taken()
        self._began = True
        self._emit_event(event)
        self._events.discard()
        if event.seq == self._join_at:
            self._join()
        return self._events.taken()

    def broken(self, problem: Problem) -> list[bytes]:
        if not self._ended:
            self._begin()
            self._fail(problem.message, problem.code)
        return self._events.taken()

    # --- how a stream begins ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            self._events.run_started()

    def _join(self) -> None:
        """What is on the log already, in one snapshot."""
        self._events.discard()
        self._began = True
        self._events.run_started()
        if self._turn is not None:
            self._events.step_started(self._turn)
        valid = {sent.id for sent in self._blocks.values()}
        self._snapshot([sent for sent in self._void_thinking if sent.id not in valid])
        for activity, known in self._activities.items():
            self._events.activity(activity, *known[1:])
        for sent in self._blocks.values():
            if sent.open:
                self._open(sent)
                if sent.text:
                    self._events.block_content(sent, sent.content)

    def _snapshot(self, void: list[SentBlock]) -> None:
        own = messages_of(self._run, list(self._blocks.values()), void)
        names = {message["id"] for message in own}  # of a run that goes on, the request has messages too
        self._events.snapshot([*(each for each in self._given if each.get("id") not in names), *own])

    # --- events -------------------------------------------------------------------------------------------------

    def _emit_event(self, event: public.PublicEvent) -> None:
        match event:
            case public.BlockStarted():
                self._step(event.turn)
                self._block_started(event)
            case public.Chunk():
                sent = self._blocks.get(event.block)
                if sent and sent.open and event.tool_call_part in (None, "input"):
                    sent.text.append(event.text)
                    self._events.block_content(sent, event.text)
            case public.BlockComplete():
                self._step(event.turn)
                self._block_complete(event)
            case public.ToolProgress():
                given = {"progress": event.progress, "total": event.total, "message": event.message}
                known = {name: each for name, each in given.items() if each is not None}
                call = {"toolCallId": event.tool_id, "toolName": event.tool_name}
                self._events.custom("tool_progress", {**call, **known})
            case public.ImagePreview():
                self._events.media("image_preview", event.block, event.image, index=event.index)
            case public.Waiting():
                self._waits[event.wait] = event
            case public.Resumed():
                self._waits.pop(event.wait, None)
            case public.Retrying() | public.Restarted():
                self._void(event)
            case public.UsageReported():
                self._events.custom("usage", self._events.usage(event.total)[0])
            case public.Completed() | public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                self._end(event)
            case _:  # Started is sent already; an event of a newer version
                pass

    def _step(self, turn: int) -> None:
        if turn != self._turn:
            self._finish_step()
            self._turn = turn
            self._events.step_started(turn)

    def _finish_step(self) -> None:
        self._hand_over_items()
        if self._turn is not None:
            self._events.step_finished(self._turn)
            self._turn = None

    def _block_started(self, event: public.BlockStarted) -> None:
        if event.kind in ("image", "tool_result", "server_tool"):
            return
        kind = "text" if event.kind == "audio" else event.kind  # what a sound says is a text
        message = event.tool_id if event.kind == "tool_call" and event.tool_id else f"{self._run}:{event.block}"
        sent = SentBlock(block=event.block, turn=event.turn, kind=kind, id=message, name=event.tool_name or "", text=[])
        self._blocks[event.block] = sent
        self._open(sent)

    def _open(self, sent: SentBlock) -> None:
        self._events.block_start(sent, self._blocks.values())

    def _block_complete(self, event: public.BlockComplete) -> None:
        if event.kind == "tool_result":
            self._result(event)
        elif event.kind == "image":
            if event.image and not event.cut and not event.image.draft:
                self._events.media("image", event.block, event.image)
        elif event.kind == "server_tool":
            if step := self._steps.read(event):
                self._items[event.block] = original(event)
                self._hosted(event.block, step)
        elif (sent := self._blocks.get(event.block)) and sent.open:
            if event.cut and event.kind == "tool_call":
                self._withdraw([sent])
                return
            if not event.cut:
                items = [] if sent.kind == "thinking" else self._taken_items()
                sent.encrypted = encrypted(event, items)
            self._close(sent)
            if event.audio and not event.cut:
                self._events.media("audio", event.block, event.audio)
            self._cite(event)

    def _hosted(self, block: int, step: Step) -> None:
        """What the provider did itself: an activity, which is shown and is no part of the conversation."""
        activity = f"{self._run}:{step.id}"
        if step.called is not None:
            self._activities[activity] = (block, step.tool, {"tool": step.name, "input": step.called})
        if (known := self._activities.get(activity)) is None:
            return
        if step.output:
            known[2]["output"] = output_value(step.output)
        self._events.activity(activity, *known[1:])

    def _taken_items(self) -> list[Json]:
        items, self._items = [*self._items.values()], {}
        return items

    def _hand_over_items(self) -> None:
        """Put items that nothing else of the turn follows into a message of their own."""
        if (block := next(reversed(self._items), None)) is not None and self._turn is not None:
            given = encrypted(None, self._taken_items())
            sent = SentBlock(block=block, turn=self._turn, kind="thinking", id=f"{self._run}:{block}", text=[])
            self._blocks[block] = sent
            self._open(sent)
            sent.encrypted = given
            self._close(sent)

    def _cite(self, event: public.BlockComplete | public.Completed) -> None:
        if found := citations_of(event):
            about = {"message": f"{self._run}:{event.block}"} if isinstance(event, public.BlockComplete) else {}
            self._events.custom("citations", {**about, "citations": [citation_value(cited) for cited in found]})

    def _close(self, sent: SentBlock) -> None:
        sent.open = False
        self._events.block_end(sent)

    def _result(self, event: public.BlockComplete) -> None:
        sent = SentBlock(
            block=event.block,
            turn=event.turn,
            kind="tool_result",
            id=f"{self._run}:{event.block}",
            call=event.tool_id or "",
            text=[event.content or ""],
            open=False,
            failed=bool(event.is_error),
        )
        self._blocks[event.block] = sent
        self._events.tool_result(sent)

    def _void(self, event: public.Retrying | public.Restarted) -> None:
        kind = "restarted" if isinstance(event, public.Restarted) else "retrying"
        value = {
            "code": event.error.code,
            "drop_from": event.drop_from,
            "next_attempt": event.next_attempt,
            "delay_ms": event.delay_ms,
            "continues": isinstance(event, public.Retrying) and bool(event.continues),
        }
        self._events.custom(kind, value)
        for activity in [each for each, known in self._activities.items() if known[0] >= event.drop_from]:
            self._events.activity(activity, self._activities.pop(activity)[1], {"void": True})
        self._items = {block: item for block, item in self._items.items() if block < event.drop_from}
        self._withdraw([sent for sent in self._blocks.values() if sent.block >= event.drop_from])

    def _withdraw(self, void: list[SentBlock]) -> None:
        """Take back what the client has of these blocks."""
        if not void:
            return
        for sent in void:
            if sent.open:
                self._close(sent)
            if sent.kind == "tool_call":  # the snapshot removes the result
                self._events.void_call(sent)
            del self._blocks[sent.block]
        self._void_thinking += [sent for sent in void if sent.kind == "thinking"]
        self._snapshot(void)
        for sent in self._blocks.values():  # the snapshot replaced the messages that are still open
            if sent.open and sent.text:
                self._events.block_content(sent, sent.content)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end(self, event: public.TerminalEvent) -> None:
        match event:
            case public.Completed():
                self._cite(event)
                self._close_all()
                outcome: Json = {"type": "success"}
                if interrupts := [interrupt(self._run, each) for each in self._waits.values() if each.what != RESULT]:
                    outcome = {"type": "interrupt", "interrupts": interrupts}
                elif self._waits:
                    outcome["pendingToolCallIds"] = [each.tool_id for each in self._waits.values()]
                elif event.finish == "tool_use" and (pending := self._pending()):
                    outcome["pendingToolCallIds"] = pending
                self._finish(event, outcome)
            case public.Cancelled():
                self._close_all()
                self._finish(event, {"type": "cancelled"})
            case public.RunFailedEvent():
                problem = of_run(event.error, self._run)
                self._fail(problem.message, problem.code, event.usage)
            case public.Incomplete():
                code = event.error.code if event.error else "stream_cut"
                self._fail(f"{code}: {event.reason}", code, event.usage)

    def _close_all(self) -> None:
        for sent in self._blocks.values():
            if sent.open:
                self._close(sent)
        self._finish_step()

    def _pending(self) -> list[str]:
        answered = {sent.call for sent in self._blocks.values() if sent.kind == "tool_result"}
        return [sent.id for sent in self._blocks.values() if sent.kind == "tool_call" and sent.id not in answered]

    def _finish(self, event: public.Completed | public.Cancelled, outcome: Json) -> None:
        self._events.run_finished(outcome, event.usage)
        self._ended = True

    def _fail(self, message: str, code: str, usage: Usage | None = None) -> None:
        self._events.run_error(message, code, usage)
        self._ended = True

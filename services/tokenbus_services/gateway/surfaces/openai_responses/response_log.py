"""Encodes one run's log as the events of a response. Pure: the same log gives the same events and numbers.

The stream begins with `response.created` and ends with one of `response.completed`, `response.incomplete` and
`response.failed`. Only settled blocks become output items, since an item cannot be taken back (see `settling`). A call
that is cut after its first argument is never done, and the response has it only if it reached a limit.
"""

from __future__ import annotations

from typing import Any

from tokenbus.events import public
from tokenbus.events.error_info import ErrorInfo
from tokenbus_services.gateway.problem import Problem, of_run
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, GatewayNote, WholeAnswer, encode_line
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.gateway.surfaces.hosted import Steps, is_own
from tokenbus_services.gateway.surfaces.openai_responses.items import (
    CustomCall,
    FunctionCall,
    FunctionOutput,
    HostedItem,
    Image,
    OutputItem,
    WholeItem,
    item_of,
)
from tokenbus_services.gateway.surfaces.openai_responses.parts import ANSWER, REQUEST, Asked, Parts
from tokenbus_services.gateway.surfaces.openai_responses.response_object import ResponseObject, settings_of
from tokenbus_services.gateway.surfaces.owed_calls import OwedCall, OwedCalls
from tokenbus_services.gateway.surfaces.settling import Settling

Json = dict[str, Any]
_VOID = -1


class ResponseLog:
    """Feed it the run's events from seq 0. `response` is the response as it is then."""

    def __init__(self, note: GatewayNote, run: str, *, streamed: bool, part: int | None = 0) -> None:
        """``streamed``: items that were sent cannot become void; if a turn starts over after its text, the response
        fails. Otherwise they are removed. ``part``: of a run that waited for leave; None: all of them as one.
        """
        self._note = note
        self._part = part
        self._parts = Parts()
        self._asked = Asked(run)
        self._owed = OwedCalls()
        self._run = run
        self._settings = settings_of(note)
        self._streamed = streamed
        self._settling = Settling(hold_thinking=True, hold_calls=True, on_failure=self._settings.on_failure)
        self._object = ResponseObject(note, run)
        self._items: dict[int, OutputItem] = {}
        self._custom_calls: set[str] = set()
        """Ids of the calls whose input is free text."""
        """By output index."""
        self._index: dict[int, int] = {}
        """Output index by block."""
        self._steps = Steps()
        self._hosted: dict[str, HostedItem] = {}
        """Items of another API's provider that wait for their output, by the call's id."""
        self._beside_blocks = _VOID
        """Number of the last item that is of no block; below all blocks."""
        self.numbered = 0
        """How many events it has given."""
        self._begun = self.ended = False

    @property
    def response(self) -> Json:
        """The response object as it is now."""
        return self._object.build([item.so_far for item in self._items.values()])

    @property
    def status(self) -> str:
        return self._object.status

    def feed(self, event: public.PublicEvent) -> list[Json]:
        """Return the events to send, each with its `sequence_number`."""
        number = self._parts.feed(event)
        self._owed.feed(event)
        if self._part is not None and number < self._part:
            for each in self._settling.feed(event):
                self._encode(each)
            return []
        if self._part is not None and number > self._part:
            return self.asks()
        if self._part and not self._begun:
            self._leave_earlier_parts()
        events = self._begin()
        for each in self._settling.feed(event):
            if not self.ended:
                events += self._encode(each)
        return self._number(events)

    def asks(self) -> list[Json]:
        """End the response where the run waits for its client."""
        return [] if self.ended else self._number([*self._begin(), *self._end(self._object.asks())])

    @property
    def may_end(self) -> bool:
        """Whether the response ends here, if the log has all that the run waits for."""
        return self._part is not None and self._parts.number == self._part and self._parts.asks

    def _leave_earlier_parts(self) -> None:
        """Their items belong to other responses."""
        self._items.clear()
        self._index = dict.fromkeys(self._index, _VOID)
        self._hosted.clear()
        before = self._object
        self._object = ResponseObject(self._note, self._run, self._part or 0)
        self._object.answered_as(before)

    def broken(self, problem: Problem) -> list[Json]:
        """End the response with the gateway's own error."""
        if self.ended:
            return []
        events = self._begin()
        return self._number([*events, *self._end(self._object.broken(problem))])

    def _begin(self) -> list[Json]:
        if self._begun:
            return []
        self._begun = True
        events = [self._state("response.created")]
        if self._settings.background:
            events.append(self._state("response.queued"))
        self._object.status = "in_progress"
        return [*events, self._state("response.in_progress")]

    def _encode(self, event: public.PublicEvent) -> list[Json]:
        match event:
            case public.Started():
                self._object.answered_by(event.provider, event.model)
            case public.BlockStarted():
                return self._item(event)[1]
            case public.Chunk():
                item, events = self._item(event)
                return [*events, *self._of(item, item.chunk(event) if item and item.open else [])]
            case public.ImagePreview():
                item = self._items.get(self._index.get(event.block, -1))
                return self._of(item, item.preview(event) if item and item.open else [])
            case public.BlockComplete(item=item) if item in (REQUEST, ANSWER):
                if item == REQUEST and not event.cut:
                    self._asked.hold(event)
            case public.Waiting(what="approval"):
                return self._whole(self._asked.ask(event))
            case public.Waiting(what="tool_result"):
                return self._owed_call(event, self._owed.calls[-1])
            case public.Resumed(what="approval"):
                answer = self._asked.decided(event)
                return self._whole(answer) if self._part is None else []
            case public.BlockComplete(kind="tool_result") if not self._shows(event):
                given = self._asked.output(event)
                called = self._asked.called(event) or (given if self._part is None else None)
                return self._whole(called) if called else []
            case public.BlockComplete(kind="server_tool") if not is_own(event, "openai-responses"):
                return self._hosted_step(event)
            case public.BlockComplete():
                return self._complete_item(event)
            case public.Retrying() | public.Restarted():
                if isinstance(event, public.Retrying) and event.fallback:
                    self._object.answered_by(event.fallback.provider, event.fallback.model)
                return self._void(event.drop_from, event.error)
            case public.UsageReported():
                self._object.count(event.usage, event.total)
            case public.Answering():
                self._object.answered_by(event.provider, event.model)
            case _ if isinstance(event, public.TERMINAL):
                left = [each for block in self._asked.not_asked() for each in self._complete_item(block)]
                return [*left, *self._end(self._object.end(event))]
            case _:
                pass
        return []

    def _complete_item(self, event: public.BlockComplete) -> list[Json]:
        item, events = self._item(event)
        return [*events, *self._complete(item, event)]

    def _owed_call(self, event: public.Waiting, call: OwedCall) -> list[Json]:
        """A call that the client runs, whole: its arguments may be other than the model's."""
        self._asked.owe(event, call)
        at: Json = {"run": event.run, "seq": event.seq, "turn": event.turn, "attempt": event.attempt}
        at |= {"block": call.block, "kind": "tool_call", "tool_id": call.id, "tool_name": call.name}
        item = item_of(self._run, public.BlockStarted(**at, free_text=call.free_text), self._settings.namespaces)
        written = public.Chunk(**at, text=call.arguments, visible=False, depth=0, tool_call_part="input")
        events = [*self._added(item), *self._of(item, item.chunk(written))]
        return [*events, *self._done(item, public.BlockComplete(**at))]

    def _whole(self, state: Json) -> list[Json]:
        """An item that is of no block, and complete at once."""
        self._beside_blocks -= 1
        item = WholeItem(self._beside_blocks, state)
        return [*self._added(item), *self._done(item, self._cut(item))]

    # --- items --------------------------------------------------------------------------------------------------

    def _item(
        self, event: public.BlockStarted | public.Chunk | public.BlockComplete
    ) -> tuple[OutputItem | None, list[Json]]:
        """The block's item, and the events that begin it if it is new. None: the client does not see the block."""
        if event.block in self._index:
            return self._items.get(self._index[event.block]), []
        if not self._shows(event):
            return None, []
        item = item_of(self._run, event, self._settings.namespaces)
        if isinstance(item, CustomCall):
            self._custom_calls.add(item.state["call_id"])
        elif isinstance(item, FunctionOutput) and item.state["call_id"] in self._custom_calls:
            item.state["type"] = "custom_tool_call_output"
        events = self._added(item)
        if isinstance(item, Image):
            events += self._of(item, item.begin())
        return item, events

    def _added(self, item: OutputItem) -> list[Json]:
        index = self._index[item.block] = max(self._items, default=-1) + 1
        self._items[index] = item
        return [{"type": "response.output_item.added", "output_index": index, "item": item.state}]

    def _hosted_step(self, event: public.BlockComplete) -> list[Json]:
        """What another API's provider did itself: an item that is done with its output."""
        step = self._steps.read(event)
        events: list[Json] = []
        if step is None or (step.tool == "other" and step.called is not None):
            return []  # this API has no word for it
        if step.called is None:
            item = self._hosted.pop(step.id, None)
            if item is None or self._index[item.block] not in self._items:
                return []
            item.add(event, step)
        else:
            item = HostedItem(self._run, event, step)
            events = self._added(item)
        if not item.has_output:
            self._hosted[step.id] = item
            return events
        return [*events, *self._done(item, event)]

    def _shows(self, event: public.BlockStarted | public.Chunk | public.BlockComplete) -> bool:
        if event.kind in ("tool_call", "tool_result") and event.tool_name in self._settings.client:
            return False  # shown where the run waits for the client
        if event.kind == "tool_call":
            return self._settings.show_tools or not self._settings.bus_tools
        if event.kind == "tool_result":
            return self._settings.show_tools
        if event.kind == "server_tool":
            if not isinstance(event, public.BlockComplete) or event.cut:
                return False
            return is_own(event, "openai-responses")
        return True

    def _of(self, item: OutputItem | None, events: list[Json]) -> list[Json]:
        if item is None:
            return []
        return [{**event, "output_index": self._index[item.block]} for event in events]

    def _complete(self, item: OutputItem | None, end: public.BlockComplete) -> list[Json]:
        if item is None or not item.open or (end.cut and isinstance(item, FunctionCall)):
            return []
        return self._done(item, end)

    def _done(self, item: OutputItem, end: public.BlockComplete) -> list[Json]:
        events = self._of(item, item.complete(end))
        done: Json = {"type": "response.output_item.done", "item": item.state}
        return [*events, *self._of(item, [done])]

    def _void(self, drop_from: int, error: ErrorInfo) -> list[Json]:
        """Blocks from this number on are void. If one was already sent, a streamed response ends."""
        void = [block for block, index in self._index.items() if block >= drop_from and index in self._items]
        if not void:
            return []
        if self._streamed:
            why = f"restarted: the turn starts over after its text was sent ({error.code}); read the response again"
            return self._end(self._object.fail("server", why))
        for block in void:
            del self._items[self._index[block]]
            self._index[block] = _VOID
        return []

    # --- the end ------------------------------------------------------------------------------------------------

    def _end(self, kind: str) -> list[Json]:
        events: list[Json] = []
        for index, item in list(self._items.items()):
            if not item.open:
                continue
            if isinstance(item, FunctionCall) and self._object.is_broken_off:
                del self._items[index]  # withdrawn: clients run a call once its item is done
            else:
                events += self._done(item, self._cut(item))
        self.ended = True
        return [*events, self._state(kind)]

    def _cut(self, item: OutputItem) -> public.BlockComplete:
        """An end for an item whose block has none."""
        return public.BlockComplete(run=self._run, seq=0, turn=0, attempt=0, block=item.block, kind="text", cut=True)

    def _state(self, kind: str) -> Json:
        return {"type": kind, "response": self.response}

    def _number(self, events: list[Json]) -> list[Json]:
        numbered = [
            {"type": event["type"], "sequence_number": n, **event} for n, event in enumerate(events, self.numbered)
        ]
        self.numbered += len(events)
        return numbered


DONE = b"data: [DONE]\n\n"


class ResponseStream(Encoder):
    """Server-sent events, each with its name. ``after``: the `sequence_number` after which they are sent."""

    def __init__(self, note: GatewayNote, run: str, *, after: int = -1, part: int = 0) -> None:
        self._log = ResponseLog(note, run, streamed=True, part=part)
        self._after = after

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        data = self._framed(self._log.feed(event))
        return [*data, DONE] if isinstance(event, public.TERMINAL) else data

    def broken(self, problem: Problem) -> list[bytes]:
        events = self._log.broken(problem)
        for end in events[-1:]:  # it is sent wherever the client began, or the stream would end without a word
            end["sequence_number"] = max(end["sequence_number"], self._after + 1)
        return [*self._framed(events), DONE]

    def _framed(self, events: list[Json]) -> list[bytes]:
        return [
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_line(event))
            for event in events
            if event["sequence_number"] > self._after
        ]


class ResponseFrames(Encoder):
    """The same events, each as one JSON object: the frames of a WebSocket."""

    def __init__(self, note: GatewayNote, run: str, part: int = 0) -> None:
        self._log = ResponseLog(note, run, streamed=True, part=part)

    @property
    def response(self) -> Json:
        """The response object as it is now."""
        return self._log.response

    @property
    def next_number(self) -> int:
        """The number of the next event."""
        return self._log.numbered

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        return [encode_line(each) for each in self._log.feed(event)]

    def broken(self, problem: Problem) -> list[bytes]:
        return [encode_line(each) for each in self._log.broken(problem)]


class WholeResponse(WholeAnswer):
    """The response after the run's end. A run that failed is an HTTP error."""

    def __init__(self, note: GatewayNote, run: str, part: int = 0) -> None:
        self._log = ResponseLog(note, run, streamed=False, part=part)
        self._run = run

    def feed(self, event: public.PublicEvent) -> Answer | None:
        self._log.feed(event)
        match event:
            case public.RunFailedEvent(error=error):
                return openai_refusal(of_run(error, self._run))
            case public.Incomplete(error=error) if error:
                return openai_refusal(of_run(error, self._run))
            case _ if isinstance(event, public.TERMINAL):
                return Answer(status=200, body=encode_line(self._log.response))
            case _:
                return None


class ResponseSoFar:
    """The response at any time, as `GET /v1/responses/{id}` has it: a failed run is not an HTTP error here."""

    def __init__(self, note: GatewayNote, run: str, part: int | None = 0) -> None:
        self._log = ResponseLog(note, run, streamed=False, part=part)

    def feed(self, event: public.PublicEvent) -> None:
        self._log.feed(event)

    def settle(self) -> None:
        """The log has no more now: the response is over if its run waits for the client."""
        if self._log.may_end:
            self._log.asks()

    def answer(self) -> Answer:
        return Answer(status=200, body=encode_line(self._log.response))

"""The events of one session in the words of Anthropic's managed agents. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.events import public
from tokenbus.events.normalized import FinishReason
from tokenbus.events.requests import (
    Interrupt,
    SessionMessage,
)
from tokenbus.events.sessions import (
    AnySessionEvent,
    Appended,
    Configured,
    Delivered,
    Returned,
    RunEnded,
    UnknownSessionEvent,
)
from tokenbus.events.usage import Usage
from tokenbus.events.waits import WaitInfo, WaitKind
from tokenbus_services.gateway.problem import of_end
from tokenbus_services.gateway.surfaces.anthropic_messages.sessions import (
    EVENT,
    confirmation_shown,
    decision_event,
    sent_shown,
    text_block,
    time_text,
)
from tokenbus_services.gateway.surfaces.fields import Json
from tokenbus_services.gateway.surfaces.hosted import Steps, output_value
from tokenbus_services.gateway.surfaces.parking import Parking
from tokenbus_services.gateway.surfaces.settling import Settling

PREVIEWS = ("agent.message", "agent.thinking")
_ERRORS = {"overloaded": "model_overloaded_error", "rate_limit": "model_rate_limited_error"}
_KINDS: frozenset[WaitKind] = frozenset({"approval", "tool_result"})
"""What clients of this API can decide."""
_REFUSED: frozenset[FinishReason] = frozenset({"content_filter"})


class SessionEvents:
    """The events of a session, fed with those of its one order. An event of a run has the time of the session's event
    before it: a run's own events have none.
    """

    def __init__(self, at_ms: int, *, own_tools: bool, previews: frozenset[str] = frozenset()) -> None:
        """``at_ms``: until the first event of the session. ``own_tools``: the client runs the model's calls.
        ``previews``: which events are shown while they are made.
        """
        self._at_ms = at_ms
        self._own_tools = own_tools
        self._previews = previews
        self._waiting: dict[str, SessionMessage | Interrupt] = {}
        self._run: _RunEvents | None = None
        self._stop: Json = {"type": "end_turn"}

    def feed(self, event: AnySessionEvent | public.PublicEvent) -> list[Json]:
        """The events for this one; those of previews are `event_start` and `event_delta`."""
        match event:
            case Configured():
                self._at_ms = event.at_ms
                return []
            case Appended(append=append, item=SessionMessage() | Interrupt() as item):
                self._at_ms, self._waiting[append] = event.at_ms, item
                return sent_shown(item, append)
            case Delivered(append=append):
                self._at_ms = event.at_ms
                item = self._waiting.pop(append, None)
                shown = sent_shown(item, append, event.at_ms) if item else []
                return shown if isinstance(item, Interrupt) else [*self._began(event), *shown]
            case RunEnded():
                self._at_ms = event.at_ms
                return self._ended(event)
            case Returned(append=append):
                self._at_ms = event.at_ms
                self._waiting.pop(append, None)
                return []
            case Appended() | UnknownSessionEvent():
                self._at_ms = event.at_ms
                return []
            case _:
                return self._of_run(event)

    def _began(self, event: Delivered) -> list[Json]:
        if event.run is None or event.turn or (self._run and self._run.id == event.run):
            return []
        self._run = _RunEvents(event.run, self._previews, own_tools=self._own_tools)
        return [self._status("running", f"{event.run}.running")]

    def _of_run(self, event: public.PublicEvent) -> list[Json]:
        if self._run is None or self._run.id != event.run:
            self._run = _RunEvents(event.run, self._previews, own_tools=self._own_tools)
        found = self._run.feed(event)
        if isinstance(event, public.TERMINAL):
            self._stop = self._run.stop
        return [self._timed(each) for each in found]

    @property
    def open_run(self) -> str | None:
        """The run that waits for somebody, as far as its events say."""
        return self._run.id if self._run and self._run.parking.first else None

    def parked(self, open_now: Sequence[WaitInfo]) -> list[Json]:
        """The events for a run that does nothing but wait; ``open_now``: what for."""
        if self._run is None or not self._run.parking.is_parked(open_now, _KINDS):
            return []
        return [self._timed(each) for each in self._run.idle()]

    def _ended(self, event: RunEnded) -> list[Json]:
        self._run = None
        stop, self._stop = self._stop, {"type": "end_turn"}
        if event.status == "lost":
            stop = {"type": "retries_exhausted"}
        if self._waiting:  # the next run begins
            return []
        return [{**self._status("idle", f"{event.run}.idle"), "stop_reason": stop}]

    def _status(self, status: str, name: str) -> Json:
        return self._timed({"type": f"session.status_{status}", "id": EVENT + name})

    def _timed(self, event: Json) -> Json:
        return event if event["type"].startswith("event_") else {**event, "processed_at": time_text(self._at_ms)}


class _RunEvents:
    """The events of one run. Calls are told once their turn is over: a retry may void them."""

    def __init__(self, run: str, previews: frozenset[str], *, own_tools: bool) -> None:
        self.id = run
        self._own_tools = own_tools
        self._owed: list[str] = []
        """The events of calls that the client runs."""
        self.stop: Json = {"type": "end_turn"}
        self._previews = previews
        self._settling = Settling(hold_thinking=True, hold_calls=True)
        self._steps = Steps()
        self._request: str | None = None
        """The id of the model's request that is under way."""
        self._uses: dict[str, str] = {}
        """The event of each call, by the call's id."""
        self.parking = Parking()
        self._results: set[str] = set()
        """Calls that the client runs while the run waits."""
        self._calls: list[public.BlockComplete] = []
        """Calls of which it is not known yet whether they wait for somebody."""
        self._asks: dict[str, str] = {}
        """The event of the call that each open wait is for."""
        self._idle_for: list[str] = []
        """The events that the session has told it waits for."""

    def feed(self, event: public.PublicEvent) -> list[Json]:
        """The events of this one, without their times."""
        out: list[Json] = []
        if not isinstance(event, public.Waiting):
            out += self.idle()
        self.parking.feed(event)
        if isinstance(event, public.Retrying | public.Restarted):
            out += self._close(None, failed=True)
        elif _is_of_model(event) and self._request is None:
            self._request = self._name(f"{event.turn}.{event.attempt}.request")
            out.append({"type": "span.model_request_start", "id": self._request})
        for each in self._settling.feed(event):
            out += self._settled(each)
        return out

    def idle(self) -> list[Json]:
        """The session waits for somebody, if it has not told so."""
        if self.parking.first is None or self._idle_for == [*self._asks.values()]:
            return []
        self._idle_for = [*self._asks.values()]
        name = self._name(f"idle.{'.'.join(self._asks)}")
        stop: Json = {"type": "requires_action", "event_ids": self._idle_for}
        return [*self._told(), {"type": "session.status_idle", "id": name, "stop_reason": stop}]

    def _told(self, until: int | None = None, *, asks: str = "") -> list[Json]:
        """The events of calls up to a block. ``asks``: what that one waits for."""
        calls = [call for call in self._calls if until is None or call.block <= until]
        self._calls = [call for call in self._calls if call not in calls]
        told: list[Json] = []
        for call in calls:
            use = self._use(call.tool_id or "", call.tool_name or "", call.input or {}, self._name(call.block))
            if call.block == until and asks == "approval":
                use["evaluated_permission"] = "ask"
            elif call.block == until and asks == "tool_result":
                del use["evaluated_permission"]
                use["type"] = "agent.custom_tool_use"
            told.append(use)
        return told

    def _waits(self, event: public.Waiting) -> list[Json]:
        told = self._told(event.block, asks=event.what)
        name = self._uses.get(event.tool_id, self._name(event.block))
        if event.what == "tool_result" and not told:  # it was allowed before
            name = f"{name}.allowed"
            given: object = msgspec.json.decode(event.arguments or "{}")
            told.append({"type": "agent.custom_tool_use", "id": name, "name": event.tool_name, "input": given})
        self._asks[event.wait] = name
        if event.what == "tool_result":
            self._results.add(event.tool_id)
            self._uses[event.tool_id] = name
        return told

    def _resumed(self, event: public.Resumed) -> list[Json]:
        use = self._asks.pop(event.wait, None)
        out: list[Json] = []
        if use and event.what == "approval":
            allowed, name = event.decision == "allow", decision_event(self.id, event.wait)
            out.append(confirmation_shown(use, allowed=allowed, reason=event.reason, event=name, at_ms=event.at_ms))
        if self._idle_for and not self._asks:
            self._idle_for = []
            out.append({"type": "session.status_running", "id": self._name(f"running.{event.wait}")})
        return out

    def _settled(self, event: public.PublicEvent) -> list[Json]:
        match event:
            case public.Waiting():
                return self._waits(event)
            case public.Resumed():
                return self._resumed(event)
            case public.BlockStarted(kind="text" | "thinking" as kind, block=block):
                return self._preview("agent.message" if kind == "text" else "agent.thinking", block)
            case public.Chunk(kind="text", visible=True) if "agent.message" in self._previews:
                delta = {"type": "content_delta", "index": 0, "content": text_block(event.text)}
                return [{"type": "event_delta", "event_id": self._name(event.block), "delta": delta}]
            case public.BlockComplete():
                return self._block(event)
            case public.UsageReported(usage=usage):
                return self._close(usage)
            case public.Completed() | public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                return self._end(event)
            case _:
                return []

    def _preview(self, kind: str, block: int) -> list[Json]:
        if kind not in self._previews:
            return []
        return [{"type": "event_start", "event": {"type": kind, "id": self._name(block)}}]

    def _block(self, event: public.BlockComplete) -> list[Json]:
        name = self._name(event.block)
        match event.kind:
            case "text" | "audio" if event.content:
                return [{"type": "agent.message", "id": name, "content": [text_block(event.content)]}]
            case "thinking" if not event.cut:
                return [{"type": "agent.thinking", "id": name}]
            case "tool_call" if not event.cut and self._own_tools:
                self._owed.append(name)
                about = {"name": event.tool_name or "", "input": event.input or {}}
                return [{"type": "agent.custom_tool_use", "id": name, **about}]
            case "tool_call" if not event.cut:
                self._calls.append(event)
                return []
            case "tool_result" if event.tool_id in self._results:
                about = {"is_error": bool(event.is_error), "content": [text_block(event.content or "")]}
                use = self._uses.get(event.tool_id, "")
                return [{"type": "user.custom_tool_result", "id": name, "custom_tool_use_id": use, **about}]
            case "tool_result":
                return [
                    *self._told(),
                    self._result(event.tool_id or "", event.content or "", name, failed=bool(event.is_error)),
                ]
            case "server_tool" if step := self._steps.read(event):
                said = [] if step.called is None else [self._use(step.id, step.name, step.called, name)]
                if step.output:
                    text = msgspec.json.encode(output_value(step.output)).decode()
                    said.append(self._result(step.id, text, f"{name}.result", failed=step.output.failed))
                return said
            case _:
                return []

    def _use(self, call: str, tool: str, given: Mapping[str, object], name: str) -> Json:
        self._uses[call] = name
        return {"type": "agent.tool_use", "id": name, "name": tool, "input": given, "evaluated_permission": "allow"}

    def _result(self, call: str, text: str, name: str, *, failed: bool) -> Json:
        use = self._uses.get(call, "")
        return {
            "type": "agent.tool_result",
            "id": name,
            "tool_use_id": use,
            "content": [text_block(text)],
            "is_error": failed,
        }

    def _end(
        self, event: public.Completed | public.Incomplete | public.RunFailedEvent | public.Cancelled
    ) -> list[Json]:
        failed = isinstance(event, public.Incomplete | public.RunFailedEvent)
        out = self._told()
        out += self._close(None, failed=failed)
        if failed:
            problem = of_end(event)
            error = {"type": _ERRORS.get(problem.kind, "model_request_failed_error"), "message": problem.message}
            self.stop = {"type": "retries_exhausted"}
            retry = {"retry_status": {"type": "exhausted"}}
            out.append({"type": "session.error", "id": self._name("error"), "error": {**error, **retry}})
        elif event.finish in _REFUSED:
            self.stop = {"type": "refusal"}
        elif isinstance(event, public.Completed) and self._owed:
            self.stop = {"type": "requires_action", "event_ids": self._owed}
        return out

    def _close(self, usage: Usage | None, *, failed: bool = False) -> list[Json]:
        request, self._request = self._request, None
        if request is None:
            return []
        used = usage or Usage()
        counts = {
            "input_tokens": used.input or 0,
            "output_tokens": used.output or 0,
            "cache_read_input_tokens": used.cache_read or 0,
            "cache_creation_input_tokens": used.cache_write or 0,
        }
        about: Json = {"model_request_start_id": request, "model_usage": counts, "is_error": failed}
        return [{"type": "span.model_request_end", "id": f"{request}.end", **about}]

    def _name(self, place: object) -> str:
        return f"{EVENT}{self.id}.{place}"


def _is_of_model(event: public.PublicEvent) -> bool:
    """Whether a request of the model is under way: not while a tool runs or somebody decides."""
    if isinstance(event, public.BlockStarted | public.BlockComplete | public.Chunk):
        return event.kind != "tool_result"
    return isinstance(event, public.Started | public.Answering | public.ImagePreview | public.BlockProgress)

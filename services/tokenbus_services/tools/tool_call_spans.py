"""Trace context of tool calls, and their spans."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tokenbus.bus.server.clock import ServerClock
from tokenbus.events.frames import ToolWork
from tokenbus_services.telemetry import RunTracer, Span, traceparent_of, working_for
from tokenbus_services.telemetry.gen_ai import shown_json
from tokenbus_services.tools.tool_call import ToolOutcome


class ToolSpans:
    """Records a span for each call. Without a tracer it only hands the publisher's context on."""

    def __init__(self, tracer: RunTracer | None, clock: ServerClock) -> None:
        self._tracer = tracer
        self._clock = clock

    def now_ms(self) -> int:
        """The workers' clock."""
        return self._clock.now_ms()

    def traceparent(self, work: ToolWork) -> str | None:
        """The context to hand to the tool; None if there is none."""
        if self._tracer is None:
            return work.traceparent or None
        trace = self._tracer.context(work.run, work.traceparent)
        return traceparent_of(trace, trace.tool(work.turn, work.block))

    def working(self, work: ToolWork) -> AbstractContextManager[None]:
        """What is done meanwhile is done for this call: requests to the blob store are beneath its span."""
        if self._tracer is None or (trace := self._tracer.trace(work.run, work.traceparent)) is None:
            return nullcontext()
        return working_for(traceparent_of(trace, trace.tool(work.turn, work.block)))

    def called(self, work: ToolWork, outcome: ToolOutcome, *, begin_ms: int, delivery: int) -> None:
        """Record that a call is over. ``delivery`` counts the workers that tried it."""
        if self._tracer is None or (trace := self._tracer.trace(work.run, work.traceparent)) is None:
            return
        content = self._tracer.content
        self._tracer.record(
            trace,
            Span(
                name=f"execute_tool {work.name[:80]}",
                span_id=trace.tool(work.turn, work.block),
                parent_id=trace.root,
                begin_ms=begin_ms,
                end_ms=self._clock.now_ms(),
                attributes={
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": work.name[:80],
                    "gen_ai.tool.call.id": work.tool_id,
                    "gen_ai.tool.type": "function",
                    "gen_ai.tool.call.arguments": shown_json(work.arguments) if content else None,
                    "gen_ai.tool.call.result": shown_json(outcome.content) if content else None,
                    "tokenbus.run.id": work.run,
                    "tokenbus.turn": work.turn,
                    "tokenbus.block": work.block,
                    "tokenbus.delivery": delivery,
                },
                error="tool" if outcome.is_error else None,
            ),
        )

"""A tool executor: takes calls from the queue, runs them concurrently, and delivers each result exactly once.

A call may run twice if its worker dies in the middle, but not after its result was delivered. The result enters
`events` once, because the script that writes it checks whether the call is still open. A call that asks a question
ends with it, in the same way, and comes again with the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenbus.bus import scripts
from tokenbus.bus.control import ControlListener
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import wait_until_replicated
from tokenbus.bus.run_record import STATUS, answer_field, call_fence, call_field, task_field
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus.errors import ToolFailure
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    ChildEnd,
    Control,
    EventFrame,
    GivenAnswer,
    ToolAsked,
    ToolReported,
    ToolReturned,
    ToolWork,
    answer_decoder,
    encode,
    tool_decoder,
)
from tokenbus_services.executor.processes import End
from tokenbus_services.runtime.mcp_tool_cache import McpToolCache
from tokenbus_services.runtime.queue_work import MOST_DELIVERIES, QueueService, dead_letter_run
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import RunTool
from tokenbus_services.telemetry import Span
from tokenbus_services.telemetry.tracer import shown_json
from tokenbus_services.tools.child_runs import ChildCall, ChildRuns, Found
from tokenbus_services.tools.executor import ToolCall, ToolExecutor, ToolOutcome

if TYPE_CHECKING:
    from tokenbus_services.tools.mcp.registry import McpLists

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.5
"""How soon the answer is looked for to a question for which a call waits here."""
STILL_S = 120.0
"""A call that makes no progress for this long after its timeout is stuck. By then its run has continued without it."""


class ToolService(QueueService):
    """The calls of all runs, shared among the executors."""

    name = topic = fair = "tools"
    description = "Tool calls to run; results go to `events`."

    def __init__(self, core: WorkerCore, executor: ToolExecutor, metrics: CallMetrics) -> None:
        super().__init__(core, most=core.settings.limits.tool_calls_per_worker)
        self._executor = executor
        self._metrics = metrics
        self._tracer = core.tracer
        self._children = ChildRuns(core.server, core.settings)
        self._control = ControlListener(core.server, self._keys, self._on_control, liveness=core.liveness)
        self._lists: McpLists | None = None
        if executor.mcp:
            from tokenbus_services.tools.mcp.registry import McpLists  # only with the extra `mcp`

            self._lists = McpLists(executor.mcp, McpToolCache(core.server, self._keys), core.liveness)

    @property
    def ready(self) -> bool:
        return super().ready and (self._executor.mcp is None or self._executor.mcp.ready)

    async def _opening(self) -> None:
        await self._executor.open(self.liveness)
        if self._lists:
            await self._lists.open()
        await self._control.open()

    async def _closing(self) -> None:
        await self._control.close()
        if self._lists:
            await self._lists.close()
        await self._executor.close()

    async def _serve_more(self, keys: Keys) -> None:
        await self._control.add(keys)
        await super()._serve_more(keys)

    async def _work(self, item: QueueItem) -> None:
        for data in item.fields.values():
            work = tool_decoder.decode(data)
            if work.child:
                await self._look_at_child(work, item.deliveries)
                continue
            if work.given_up:
                await self._executor.give_up(self._call(work))
                continue
            if work.durable:
                await self._replicated(work)
            task = _TaskOf(self._server, self._keys, work)
            if not await task.is_wanted():
                continue  # its run ended while the call was queued, or its worker died after delivering the result
            begin_ms = self._server.clock.now_ms()
            if item.deliveries > MOST_DELIVERIES:
                problem = f"the tool's worker was lost {item.deliveries - 1} times"
                outcome = ToolOutcome(problem, is_error=True)
            else:
                begin = time.perf_counter()
                call = self._call(work)
                with self._tracer.working(*span_of(work)):
                    outcome = await self._executor.execute(
                        call,
                        partial(self._progress, work),
                        partial(self._hold, work),
                        task,
                    )
                self._metrics.ran(time.perf_counter() - begin, outcome.kind)
            await self._deliver_result(work, outcome)
            if not outcome.asked:
                self._record_call(work, outcome, begin_ms=begin_ms, delivery=item.deliveries)

    def _call(self, work: ToolWork) -> ToolCall:
        return ToolCall(
            run=work.run,
            turn=work.turn,
            block=work.block,
            tool_id=work.tool_id,
            name=work.name,
            arguments=work.arguments,
            free_text=work.free_text,
            timeout_s=work.timeout_s,
            tenant=work.tenant,
            metadata=work.metadata or {},
            traceparent=self._tracer.handed_on(*span_of(work)),
            answers=work.answers,
            state=work.state,
        )

    async def _look_at_child(self, work: ToolWork, deliveries: int) -> None:
        """Publish the child run of a call, or deliver its result, or leave it alone while it runs."""
        begin_ms, found = self._server.clock.now_ms(), await self._children.look(work)
        match found:
            case None:
                return
            case Found(attempt, text, end):
                outcome = await self._executor.outcome(text, is_error=end.status != "completed")
            case ChildCall(attempt):
                try:
                    if deliveries > MOST_DELIVERIES:
                        problem = f"the tool's worker was lost {deliveries - 1} times"
                        raise ToolFailure(work.name, "unavailable", problem)
                    tool, call = self._settings.tools.get(work.name), self._call(work)
                    if not isinstance(tool, RunTool):
                        raise ToolFailure(work.name, "unknown_tool", f"no tool {work.name!r} begins runs here")
                    arguments = self._executor.arguments(call)
                    await self._children.publish(work, found, tool, arguments, call.traceparent)
                except ToolFailure as e:
                    end, outcome = None, await self._executor.outcome(e.problem, is_error=True)
                else:
                    log.info("child_published", run=work.run, tool=work.name, child=work.child)
                    self._record_call(work, ToolOutcome(""), begin_ms=begin_ms, delivery=deliveries)
                    return
        await self._deliver_result(msgspec.structs.replace(work, attempt=attempt), outcome, end)

    def _record_call(self, work: ToolWork, outcome: ToolOutcome, *, begin_ms: int, delivery: int) -> None:
        """Record the span of a call that is over. ``delivery`` counts the workers that tried it."""
        if (trace := self._tracer.trace(work.run, work.traceparent)) is None:
            return
        content = self._tracer.content
        self._tracer.record(
            trace,
            Span(
                name=f"execute_tool {work.name[:80]}",
                span_id=trace.tool(work.turn, work.block),
                parent_id=trace.root,
                begin_ms=begin_ms,
                end_ms=self._server.clock.now_ms(),
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

    def _still_s(self, item: QueueItem) -> float:
        try:
            calls = [tool_decoder.decode(data) for data in item.fields.values()]
        except msgspec.MsgspecError:
            return STILL_S  # its work will report the problem
        return max((self._executor.timeout_of(work.name, work.timeout_s) for work in calls), default=0) + STILL_S

    async def _replicated(self, work: ToolWork) -> None:
        """Wait until all that led to this call is replicated: it may have effects that nobody can take back."""
        await retry_until_available(
            self._server,
            lambda: wait_until_replicated(self._server, self._keys, self._keys.partition_of(work.run)),
            what="replication of what led to a tool's call",
        )

    async def _progress(self, work: ToolWork, report: ToolReported) -> None:
        await run_script(self._server, self._script_call(scripts.tool_progress, work, report))

    async def _hold(self, work: ToolWork, asked: ToolAsked) -> GivenAnswer:
        """Submit a question for which the call waits here, and return the answer once the parser has it. Raises
        ToolFailure if the call is over, or asked something else when it ran before.
        """
        key, field = self._keys.run(work.run), answer_field(asked.block, asked.number)
        submitted, look_s = False, FIRST_LOOK_S
        call = self._script_call(scripts.tool_progress, work, asked)
        while True:
            found: bytes | None = await retry_until_available(
                self._server, lambda: self._server.client.hget(key, field), what="look-up of an answer"
            )
            if found is not None:
                given = answer_decoder.decode(found)
                if given.question != asked.question:
                    raise ToolFailure(work.name, "bad_question", "the call asked something else when it ran before")
                return given
            if not submitted:
                if not await retry_until_available(
                    self._server, lambda: run_script(self._server, call), what="question of a tool"
                ):
                    raise ToolFailure(work.name, "closed", "the call is over")
                submitted = True
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, LONGEST_LOOK_S)

    async def _deliver_result(self, work: ToolWork, outcome: ToolOutcome, child_end: ChildEnd | None = None) -> None:
        images = list(outcome.images)
        returned = ToolReturned(work.block, outcome.content, outcome.is_error, outcome.blob_id, images, child_end)
        call = self._script_call(scripts.tool_result, work, outcome.asked or returned)
        taken = await retry_until_available(self._server, lambda: run_script(self._server, call), what="tool result")
        log.info("tool_returned", run=work.run, tool=work.name, kind=outcome.kind, taken=bool(taken))

    def _script_call(
        self, script: Callable[..., scripts.ScriptCall], work: ToolWork, event: ToolReported | ToolReturned | ToolAsked
    ) -> scripts.ScriptCall:
        partition = self._keys.partition_of(work.run)
        return script(
            self._keys.run(work.run),
            self._keys.topic(partition, "events"),
            self._keys.lease(partition, "parser"),
            run=work.run,
            block=work.block,
            attempt=work.attempt,
            answers=len(work.answers),
            frame=encode(EventFrame(0, CONTROL_ATTEMPT, self._server.clock.now_ms(), [event])),
        )

    async def _poisoned(self, item: QueueItem, error: Exception) -> None:
        await dead_letter_run(self._server, self._settings, self.name, item, error)

    def _on_control(self, message: Control) -> None:
        if message.what == "cancel":
            self._items.cancel(message.run)


class _TaskOf:
    """The task of one call, in its run's hash; see `KeptTask`."""

    def __init__(self, server: Server, keys: Keys, work: ToolWork) -> None:
        self._server = server
        self._key = keys.run(work.run)
        self._work = work

    async def find(self) -> str:
        found: bytes | None = await retry_until_available(
            self._server,
            lambda: self._server.client.hget(self._key, task_field(self._work.block)),
            what="look-up of a task",
        )
        return found.decode() if found else ""

    async def keep(self, task: str) -> bool:
        work = self._work
        call = scripts.keep_task(
            self._key, block=work.block, attempt=work.attempt, answers=len(work.answers), task=task
        )
        return bool(await retry_until_available(self._server, lambda: run_script(self._server, call), what="task"))

    async def is_wanted(self) -> bool:
        work = self._work
        found: list[bytes | None] = await retry_until_available(
            self._server,
            lambda: self._server.client.hmget(self._key, [STATUS, call_field(work.block)]),
            what="look-up of a tool call",
        )
        return found == [b"open", call_fence(work.attempt, len(work.answers)).encode()]


def span_of(work: ToolWork) -> tuple[str, str, str, int, int]:
    """The run, its trace context, and what names the call's span."""
    return work.run, work.traceparent, "tool", work.turn, work.block


class CallMetrics:
    """Calls by outcome, and their durations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "tokenbus_tool_call_seconds",
            "Duration of tool calls, by outcome.",
            ["outcome"],
            registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
        )

        self._ends = Counter(
            "tokenbus_tool_executor_ends", "Executors that a Python tool ended, by how.", ["end"], registry=registry
        )

    def executor_ended(self, end: End) -> None:
        """Record an executor that ended unexpectedly."""
        self._ends.labels(end).inc()

    def ran(self, seconds: float, outcome: str) -> None:
        """Record a call that ended, as `ToolOutcome.kind` names it."""
        self._seconds.labels(outcome).observe(seconds)

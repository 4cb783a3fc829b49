"""One call that has become a task at its server: asked for its state until it has a result.

The task's name is kept on the bus before the first look, so the next worker asks on instead of calling again. What a
task asks is put away as any question is. It is cancelled when nobody wants its result any more.
"""

from __future__ import annotations

import asyncio
import time

import mcp_types as types

from tokenbus.errors import ToolFailure
from tokenbus.tools import ToolContext
from tokenbus_services.tools.mcp.rounds import Round
from tokenbus_services.tools.mcp.server import McpServer, outcome_of
from tokenbus_services.tools.mcp.task_messages import MAX_TASK_ID_CHARS, TaskStarted, TaskState, pause_s
from tokenbus_services.tools.questions import Question
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import KeptTask, ToolCall, ToolOutcome

MAX_MESSAGE_CHARS = 1000


class Task:
    def __init__(
        self, server: McpServer, call: ToolCall, task: str, kept: KeptTask | None, answered: list[str] | None = None
    ) -> None:
        """``answered``: the server's names of requests that have their responses."""
        self._server = server
        self._call = call
        self._task = task
        self._kept = kept
        self._answered = answered or []
        self._said = ""

    async def begun(self, context: ToolContext, results: Results, started: TaskStarted) -> ToolOutcome | Question:
        """Keep a new task, and go on with it as `result` does."""
        if not 0 < len(self._task) <= MAX_TASK_ID_CHARS:
            raise ToolFailure(self._call.name, "bad_result", f"a task's name has 1 to {MAX_TASK_ID_CHARS} characters")
        if self._kept and not await self._kept.keep(self._task):
            await self._server.cancel_task(self._call.name, self._task)
            raise ToolFailure(self._call.name, "closed", "the call is over")
        return await self.result(context, results, first_pause_s=pause_s(started.poll_interval_ms))

    async def result(
        self,
        context: ToolContext,
        results: Results,
        responses: types.InputResponses | None = None,
        *,
        first_pause_s: float = 0.0,
    ) -> ToolOutcome | Question:
        """Return the task's result, or what it asks. ``responses``: to what it asked before. Raises ToolFailure."""
        try:
            await asyncio.sleep(first_pause_s)
            while responses:
                try:
                    await self._server.answer_task(self._call.name, self._task, responses)
                    responses = None
                except ToolFailure as e:
                    await self._unless_lost(e)
            while True:
                try:
                    state = await self._server.task_state(self._call.name, self._task)
                except ToolFailure as e:  # the task goes on; the server comes back, or the call's timeout ends this
                    await self._unless_lost(e)
                    continue
                if (done := await self._done(state, results)) is not None:
                    return done
                self._report(context, state)
                await asyncio.sleep(pause_s(state.poll_interval_ms))
        except asyncio.CancelledError:
            if time.monotonic() >= context.deadline or (self._kept and not await self._kept.is_wanted()):
                await self._server.cancel_task(self._call.name, self._task)
            raise

    async def _done(self, state: TaskState, results: Results) -> ToolOutcome | Question | None:
        name = self._call.name
        match state.status:
            case "completed":
                if state.result is None:
                    raise ToolFailure(name, "bad_result", "the task is complete, and has no result")
                return await outcome_of(name, state.result, results)
            case "failed":
                error = state.error
                why = f"MCP error {error.code}: {error.message}" if error else state.status_message or "the task failed"
                raise ToolFailure(name, "mcp_error", why)
            case "cancelled":
                raise ToolFailure(name, "mcp_error", state.status_message or "the server cancelled the task")
            case "input_required":
                asks = {k: v for k, v in (state.input_requests or {}).items() if k not in self._answered}
                before = len(self._call.answers)
                asked = Round.of_task(name, self._task, asks, self._answered, before) if asks else None
                return asked.next(self._call.answers) if asked else None
            case "working":
                return None

    def _report(self, context: ToolContext, state: TaskState) -> None:
        """Publish what the server says of the task, if it is something new."""
        said = (state.status_message or "")[:MAX_MESSAGE_CHARS]
        if said and said != self._said:
            self._said = said
            context.report(0, None, said)

    async def _unless_lost(self, failure: ToolFailure) -> None:
        """Wait for a server that is lost. Raises any other failure."""
        if failure.kind != "unavailable":
            raise failure
        await asyncio.sleep(pause_s(None))

"""Python tools as a tool worker calls them: in executors, each with one call at a time.

An executor is used again by a later call, unless a call left much memory or processes in it. If it ends by itself
during a call, an earlier one may be the cause, or something that killed it: so the call runs once more, in a new
executor, and again if that was its first. The end of a second one that no other call was in is its own. If all of them
end with their fork server, nobody knows the cause: each call runs again, up to `MOST_LOSSES` times.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import structlog

from tokenbus.bus.liveness import Liveness
from tokenbus.errors import ToolFailure
from tokenbus.tools import Image, Report, ToolContext
from tokenbus_services.executor.marks import ExecutorMarks
from tokenbus_services.executor.processes import End, ExecutorProcess, Executors
from tokenbus_services.executor.protocol import Setup
from tokenbus_services.redaction.known_secrets import secrets_of
from tokenbus_services.settings import PythonTool, Settings
from tokenbus_services.tools.python.calls import (
    Asked,
    Call,
    Cancel,
    Failed,
    Given,
    Holds,
    PythonCall,
    PythonWork,
    Reported,
    Returned,
    Shown,
    from_executor,
)
from tokenbus_services.tools.python.function import ToolFunction
from tokenbus_services.tools.questions import Holding, Question
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import Text, ToolCall, ToolOutcome

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MODULE = "tokenbus_services.tools.python.calls"
GRACE_S = 1.0
"""How long a cancelled tool may take to clean up before its executor is killed."""
IDLE_S = 60.0
"""An executor without a call for this long ends."""
MOST_LOSSES = 2
KEPT_SHARE = 4
"""An executor in which calls left more than this fraction of its memory is not used again."""
_EXITED = "the tool's process ended during the call"
_MEMORY = "the tool's process took more memory than `limits.tool_memory_bytes`"


Ended: TypeAlias = Returned | Asked | Failed
"""How a call ended."""


class ExecutorLost(Exception):
    """The executor ended during a call."""

    def __init__(self, end: End | None) -> None:
        """``end``: None if no call is at fault."""
        super().__init__(end)
        self.end = end


class ToolProcess(ExecutorProcess):
    def __init__(self, on_end: Callable[[ToolProcess, End | None], None], *, message_bytes: int) -> None:
        super().__init__(message_bytes=message_bytes)
        self._on_end = on_end
        self._report: Report | None = None
        self._holding: Holding | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self.answer: asyncio.Future[Ended] | None = None
        """Of the call in progress."""
        self.calls = 0
        """Number of calls begun."""
        self.idle_since = 0.0

    def begin(self, call: ToolCall, context: ToolContext, holding: Holding) -> asyncio.Future[Ended]:
        """Begin a call; the future has its answer, or ExecutorLost."""
        self.calls += 1
        holding.restart()
        self.name, self._report, self._holding = call.name, context.report, holding
        self.answer = answer = asyncio.get_running_loop().create_future()
        if self.gone.done():
            answer.set_exception(ExecutorLost(None))
        self.send(Call(self.calls, call, context.deadline))
        return answer

    def on_message(self, body: bytes) -> None:
        message = from_executor.decode(body)
        if message.number != self.calls or self.answer is None or self.answer.done():
            return
        if isinstance(message, Reported):
            if self._report:
                self._report(message.progress, message.total, message.message)
        elif isinstance(message, Holds):
            asking = asyncio.create_task(self._ask(message), name="question of a tool")
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
        else:
            self.answer.set_result(message)

    async def _ask(self, asked: Holds) -> None:
        assert self._holding
        try:
            self.send(Given(asked.id, await self._holding.ask(asked.question)))
        except ToolFailure as e:
            self.send(Given(asked.id, None, e.problem))

    def on_end(self, end: End | None, marks: ExecutorMarks) -> None:
        self._on_end(self, end)
        if self.answer and not self.answer.done():
            self.answer.set_exception(ExecutorLost(end))


class PythonExecutors:
    """The executors of a worker's Python tools. Call `open`, then `close`."""

    def __init__(
        self,
        settings: Settings,
        env: Mapping[str, str] = os.environ,
        *,
        source: str = "settings",
        on_end: Callable[[End], None] = lambda end: None,
    ) -> None:
        """``on_end``: called for each executor that ended unexpectedly."""
        tools = {
            name: PythonCall(tool.call, tool.parameters, tool.questions == "wait")
            for name, tool in settings.tools.items()
            if isinstance(tool, PythonTool)
        }
        # A text that is cut here is still too long for the blob store, which its result then says.
        work = PythonWork(tools=tools, source=source, result_bytes=settings.blobs.max_bytes + 1)
        self._memory_bytes = settings.limits.tool_memory_bytes
        setup = Setup(
            service="tools",
            memory_bytes=self._memory_bytes,
            path=sys.path,
            log_level=settings.log_level,
            secrets=sorted(secrets_of(settings, env)),
            work=msgspec.msgpack.encode(work),
        )
        self._report_end = on_end
        self._executors = Executors(MODULE, setup, on_look=self._end_idle)
        self._idle: list[ToolProcess] = []
        """The one that was used last is the last."""

    @property
    def count(self) -> int:
        """Number of running processes."""
        return len(self._executors.processes)

    async def open(self, liveness: Liveness) -> None:
        """Start the fork server. Raises SettingsError if a tool cannot be loaded; OSError."""
        await self._executors.start(liveness)

    async def close(self) -> None:
        """Stop all executors; calls still running are cancelled."""
        await self._executors.stop()

    async def call(self, call: ToolCall, context: ToolContext, holding: Holding) -> list[Text | Image] | Question:
        """Call a tool in an executor and return the parts of its result, or what it asks. Raises ToolFailure."""
        answer: Ended
        process = self._idle.pop() if self._idle else await self._new(call.name)
        losses = alone = 0
        while True:
            try:
                answer = await self._answer(process, call, context, holding)
                break
            except ExecutorLost as e:
                losses += e.end is None
                alone += e.end is not None and process.calls == 1
                if self._executors.closed or losses > MOST_LOSSES or alone > (e.end == "exited"):
                    problem = _MEMORY if e.end == "memory" else _EXITED
                    raise ToolFailure(call.name, e.end or "exited", problem) from None
            process = await self._new(call.name)
        if isinstance(answer, Failed):
            raise ToolFailure(call.name, answer.kind, answer.problem)
        if isinstance(answer, Asked):
            return answer.question
        return [Image(part.data, part.media_type) if isinstance(part, Shown) else part for part in answer.parts]

    async def _new(self, tool: str) -> ToolProcess:
        process = ToolProcess(self._ended, message_bytes=self._memory_bytes)
        try:
            return await self._executors.fork(process)
        except OSError as e:
            problem = f"no process could be started for the call: {e or type(e).__name__}"
            raise ToolFailure(tool, "busy", problem) from None

    async def _answer(self, process: ToolProcess, call: ToolCall, context: ToolContext, holding: Holding) -> Ended:
        answer = process.begin(call, context, holding)
        try:
            await asyncio.wait({answer})
        except asyncio.CancelledError:
            self._cancel(process, answer)
            raise
        if not answer.exception():
            self._free(process)
        return answer.result()

    def _cancel(self, process: ToolProcess, answer: asyncio.Future[Ended]) -> None:
        """Cancel the call, and kill the executor if that does not end it."""
        if answer.done():
            self._free(process)
            return
        process.send(Cancel())
        killing = asyncio.get_running_loop().call_later(GRACE_S, self._executors.kill, process, "overran")

        def ended(answer: asyncio.Future[Ended]) -> None:
            killing.cancel()
            if not answer.exception():
                self._free(process)

        answer.add_done_callback(ended)

    def _free(self, process: ToolProcess) -> None:
        """Use the executor for a later call, or end it."""
        if process.gone.done():
            return
        self._executors.drain(process)
        process.answer = None
        process.idle_since = asyncio.get_running_loop().time()
        if process.data_bytes > self._memory_bytes // KEPT_SHARE or process.has_left_processes:
            process.retire()
        else:
            self._idle.append(process)

    def _end_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).retire()

    def _ended(self, process: ToolProcess, end: End | None) -> None:
        if process in self._idle:
            self._idle.remove(process)
        if end:
            log.warning("tool_executor_ended", how=end, tool=process.name, pid=process.pid, calls=process.calls)
            self._report_end(end)


class PythonFunctionTool:
    """A Python tool, for the registry: in executors, or in the worker."""

    def __init__(self, name: str, settings: PythonTool, executors: PythonExecutors | None) -> None:
        """Without ``executors`` it runs in the worker; raises ValueError if the path then cannot be resolved."""
        self._executors = executors
        self._waits = settings.questions == "wait"
        self._function = None if executors else ToolFunction(name, settings.call, settings.parameters)

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results, *, holding: Holding
    ) -> Text | ToolOutcome | Question:
        """Call the function and return its result, or what it asks. Raises ToolFailure."""
        if self._executors:
            result = await self._executors.call(call, context, holding)
        else:
            assert self._function
            try:
                result = await self._function(call, arguments, context, holding.ask if self._waits else None)
            except MemoryError as e:
                raise ToolFailure(call.name, "exception", f"MemoryError: {e}") from None
        return result if isinstance(result, Question) else await results.of(result)

"""Runs tool calls. Every call returns an outcome that the model can read, even a failure; only a cancel propagates."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import Liveness
from tokenbus.errors import ToolFailure
from tokenbus_services.blobs.client import BlobLoader, loader_of
from tokenbus_services.executor.processes import End
from tokenbus_services.settings import DEFAULT_TOOL_TIMEOUT_S, LimitSettings, PythonTool, Settings
from tokenbus_services.tools.progress import Deliver, Reporter
from tokenbus_services.tools.python.executors import PythonExecutors
from tokenbus_services.tools.registry import ToolRegistry
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool import Declared
from tokenbus_services.tools.tool_call import Text, ToolCall, ToolOutcome, context_of

if TYPE_CHECKING:
    from tokenbus_services.tools.mcp.registry import McpServers

__all__ = ["ToolCall", "ToolExecutor", "ToolOutcome"]

_GRACE_S = 1.0
"""How long a cancelled tool may take to clean up before it is abandoned."""
_PROBLEM_CHARS = 4000

T = TypeVar("T")

_log = structlog.stdlib.get_logger()


class ToolExecutor:
    """Runs any number of calls concurrently, over one set of tools."""

    def __init__(self, registry: ToolRegistry, limits: LimitSettings, blobs: BlobLoader | None) -> None:
        """Takes ownership of ``registry`` and ``blobs``; `close` closes them."""
        self._registry = registry
        self._blobs = blobs
        self._results = Results(
            limits.tool_result_bytes, blobs, registry.redact_result, image_bytes=limits.tool_image_bytes
        )
        self._left: set[asyncio.Task[object]] = set()
        """Tasks that kept running after they were cancelled."""

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        env: Mapping[str, str] = os.environ,
        *,
        on_end: Callable[[End], None] = lambda end: None,
    ) -> ToolExecutor:
        """Create a deployment's executor. Raises SettingsError for an invalid tool.

        ``on_end``: see `PythonExecutors`.
        """
        limits, blobs = settings.limits, settings.blobs
        in_executors = limits.tool_executors and any(isinstance(tool, PythonTool) for tool in settings.tools.values())
        registry = ToolRegistry(
            settings.tools,
            settings.mcp,
            env=env,
            calls_at_once=limits.tool_calls_per_worker,
            message_bytes=limits.mcp_message_bytes,
            executors=PythonExecutors(settings, env, on_end=on_end) if in_executors else None,
        )
        return cls(registry, limits, loader_of(blobs, env))

    @property
    def mcp(self) -> McpServers | None:
        """The MCP servers, if any."""
        return self._registry.mcp

    @property
    def processes(self) -> int:
        """Number of processes in which Python tools run."""
        return self._registry.processes

    async def open(self, liveness: Liveness | None = None) -> None:
        """Start the executors and the MCP servers. HTTP tools connect on their first call. Raises SettingsError if a
        Python tool cannot be loaded; OSError.
        """
        await self._registry.open(liveness)
        _log.info("tools_ready", tools=self._registry.names)

    async def close(self) -> None:
        """Close the connections. Calls still running are abandoned."""
        await self._registry.aclose()
        if self._blobs is not None:
            await self._blobs.aclose()

    def timeout_of(self, tool: str, asked_s: float | None) -> float:
        """The timeout of a call: the smaller of the tool's own and the run's."""
        declared = self._registry.get(tool)
        own_s = declared.timeout_s if declared else None
        return min((s for s in (asked_s, own_s) if s is not None), default=DEFAULT_TOOL_TIMEOUT_S)

    async def execute(self, call: ToolCall, progress: Deliver | None = None) -> ToolOutcome:
        """Run a call and return its outcome within its timeout plus a short grace period.

        Raises only CancelledError, if cancelled. The tool is then cancelled too. ``progress`` receives the tool's
        progress reports until this returns.
        """
        began = time.monotonic()
        try:
            outcome = await self._run(call, progress)
        except ToolFailure as e:
            kind, outcome = e.kind, self._failed(e.problem)
        except Exception as e:
            _log.error("tool_call_failed", run=call.run, tool=call.name, exc_info=e)
            kind, outcome = "internal", self._failed(f"the call failed: {type(e).__name__}")
        else:
            kind = "error" if outcome.is_error else "ok"
        elapsed = round((time.monotonic() - began) * 1000)
        _log.info("tool_called", run=call.run, turn=call.turn, block=call.block, tool=call.name, kind=kind, ms=elapsed)
        return outcome

    async def _run(self, call: ToolCall, progress: Deliver | None) -> ToolOutcome:
        declared = self._registry.get(call.name)
        if declared is None and self.mcp:
            await self.mcp.started(call.name)
            declared = self._registry.get(call.name)
        if declared is None:
            raise ToolFailure(call.name, "unknown_tool", f"unknown tool {call.name[:80]!r}")
        arguments = _arguments(call, declared)
        timeout = self.timeout_of(call.name, call.timeout_s)
        with Reporter(call.block, progress, self._registry.redact) as reporter:
            context = context_of(call, time.monotonic() + timeout, reporter.report)
            work = declared.tool.run(call, arguments, context, self._results)
            result = await self._within(timeout, work, call.name)
        return await self._results.text(result) if isinstance(result, Text) else result

    async def _within(self, seconds: float, work: Coroutine[object, object, T], tool: str) -> T:
        """Return or raise the result of ``work``. Raises ToolFailure if it takes too long; it is then cancelled.

        Runs in its own task, because a tool may raise or swallow a CancelledError that is not ours.
        """
        task = asyncio.create_task(work, name=f"tool {tool}")
        try:
            with suppress(TimeoutError):
                async with process_clock.timeout(seconds):
                    await asyncio.wait({task})
            in_time = task.done()
        finally:
            if not task.done():
                await self._stop(task)
        if not in_time:
            raise ToolFailure(tool, "timeout", f"the tool returned no result within {seconds:g} s")
        if task.cancelled():
            raise ToolFailure(tool, "exception", "the tool cancelled itself")
        return task.result()

    async def _stop(self, task: asyncio.Task[T]) -> None:
        task.cancel()
        left = cast("asyncio.Task[object]", task)
        self._left.add(left)
        left.add_done_callback(self._ended)
        await asyncio.wait({task}, timeout=_GRACE_S)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, because nothing else awaits the task

    def _failed(self, problem: str) -> ToolOutcome:
        text = self._registry.redact(problem)[:_PROBLEM_CHARS]
        return ToolOutcome(text.encode(errors="replace").decode(), is_error=True)


def _arguments(call: ToolCall, declared: Declared) -> dict[str, object]:
    """Parse the arguments and validate them against the tool's schema. Raises ToolFailure."""
    if call.free_text != declared.free_text:
        takes = "free text" if declared.free_text else "a JSON object"
        raise ToolFailure(call.name, "bad_arguments", f"the tool takes {takes}")
    if call.free_text:
        return {"input": call.arguments}
    try:
        parsed: object = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, ValueError) as e:
        problem = str(e).removeprefix("JSON is malformed: ")
        if "truncated" in problem:
            problem = f"they are truncated (byte {len(call.arguments.encode(errors='replace'))})"
        raise ToolFailure(call.name, "bad_arguments", f"the arguments are not valid JSON: {problem}") from None
    except RecursionError:
        raise ToolFailure(call.name, "bad_arguments", "the arguments are nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ToolFailure(call.name, "bad_arguments", "the arguments must be one JSON object")
    arguments = cast("dict[str, object]", parsed)
    problems = declared.schema.problems(arguments)
    if problems:
        raise ToolFailure(call.name, "bad_arguments", "the arguments do not match the schema: " + "; ".join(problems))
    return arguments

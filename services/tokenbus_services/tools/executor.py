"""The deployment's tools, resolved and validated once, and their calls.

Every call returns an outcome that the model can read, even a failure, or the question with which it ended; only a
cancel propagates.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import Liveness
from tokenbus.errors import SettingsError, ToolFailure
from tokenbus.events.frames import GivenAnswer, ToolAsked
from tokenbus.tools import ToolContext
from tokenbus_services.blobs.client import BlobLoader, loader_of
from tokenbus_services.executor.processes import End
from tokenbus_services.json_schema import SchemaError, compile_schema
from tokenbus_services.net.outbound import Learn
from tokenbus_services.redaction.known_secrets import named_secret
from tokenbus_services.redaction.redactor import LEARNED, Redaction
from tokenbus_services.settings import (
    DEFAULT_TOOL_TIMEOUT_S,
    ClientTool,
    HttpTool,
    LimitSettings,
    McpSettings,
    McpStdio,
    PythonTool,
    RunTool,
    Settings,
    ToolSettings,
)
from tokenbus_services.tools.http import EndpointTool
from tokenbus_services.tools.progress import Deliver, Reporter
from tokenbus_services.tools.python.executors import PythonExecutors, PythonFunctionTool
from tokenbus_services.tools.questions import HELD_SHARE, Hold, Holding, Question, check
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool import NAME, Declared, Tool, passed_value
from tokenbus_services.tools.tool_call import KeptTask, Text, ToolCall, ToolOutcome, context_of

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
            message_bytes=limits.mcp_message_bytes,
            executors=PythonExecutors(settings, env, on_end=on_end) if in_executors else None,
        )
        return cls(registry, limits, loader_of(blobs, env))

    @property
    def mcp(self) -> McpServers | None:
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

    async def execute(
        self,
        call: ToolCall,
        progress: Deliver | None = None,
        hold: Hold | None = None,
        task: KeptTask | None = None,
    ) -> ToolOutcome:
        """Run a call and return its outcome, or what it asks, within its timeout plus a short grace period.

        Raises only CancelledError, if cancelled. The tool is then cancelled too. ``progress`` receives the tool's
        progress reports until this returns. ``hold`` submits questions for which the call waits. ``task``: what
        outlives the worker.
        """
        began = time.monotonic()
        try:
            outcome = await self._run(call, progress, hold, task)
        except ToolFailure as e:
            kind, outcome = e.kind, self._failed(e.problem)
        except Exception as e:
            _log.error("tool_call_failed", run=call.run, tool=call.name, exc_info=e)
            kind, outcome = "internal", self._failed(f"the call failed: {type(e).__name__}")
        else:
            kind = outcome.kind
        elapsed = round((time.monotonic() - began) * 1000)
        _log.info("tool_called", run=call.run, turn=call.turn, block=call.block, tool=call.name, kind=kind, ms=elapsed)
        return outcome

    async def give_up(self, call: ToolCall) -> None:
        """End what goes on elsewhere of a call whose question nobody will answer."""
        if self.mcp:  # no other tool leaves anything with a question
            await self.mcp.started(call.name)
            await self.mcp.give_up(call)

    def arguments(self, call: ToolCall) -> dict[str, object]:
        """The call's arguments, as its tool takes them. Raises ToolFailure."""
        if (declared := self._registry.get(call.name)) is None:
            raise ToolFailure(call.name, "unknown_tool", f"unknown tool {call.name[:80]!r}")
        return _arguments(call, declared)

    async def outcome(self, text: str, *, is_error: bool) -> ToolOutcome:
        """A text as the result of a call: of a bounded size, without secrets."""
        return self._failed(text) if is_error else await self._results.text(Text(text))

    async def _run(
        self, call: ToolCall, progress: Deliver | None, hold: Hold | None, task: KeptTask | None
    ) -> ToolOutcome:
        declared = self._registry.get(call.name)
        if declared is None and self.mcp:
            await self.mcp.started(call.name)
            declared = self._registry.get(call.name)
        if declared is None:
            raise ToolFailure(call.name, "unknown_tool", f"unknown tool {call.name[:80]!r}")
        arguments = _arguments(call, declared)
        timeout = self.timeout_of(call.name, call.timeout_s)
        deadline = time.monotonic() + timeout

        async def ask(question: Question, number: int) -> GivenAnswer:
            if hold is None:
                raise ToolFailure(call.name, "bad_question", "nobody can be asked")
            left_ms = round(1000 * HELD_SHARE * (deadline - time.monotonic()))
            asked = self._asked(call, declared, question, number)
            return await hold(
                msgspec.structs.replace(asked, timeout_ms=max(1, min(asked.timeout_ms, left_ms)), number=number)
            )

        with Reporter(call.block, progress, self._registry.redact) as reporter, Holding(ask, task) as holding:
            context = context_of(call, deadline, reporter.report)
            work = declared.tool.run(call, arguments, context, self._results, holding=holding)
            result = await self._within(timeout, work, call.name)
        if isinstance(result, Question):
            return ToolOutcome("", asked=self._asked(call, declared, result, len(call.answers)))
        return await self._results.text(result) if isinstance(result, Text) else result

    def _asked(self, call: ToolCall, declared: Declared, question: Question, before: int) -> ToolAsked:
        """The question as people see it; ``before``: how many the call has asked. Raises ToolFailure if it cannot be
        asked.
        """
        check(call.name, question, before)
        redact, schema = self._registry.redact_result, question.schema
        if schema is not None:
            schema = msgspec.json.decode(redact(msgspec.json.encode(schema).decode()), type=dict[str, object])
        return ToolAsked(
            call.block,
            question.id,
            redact(question.text),
            round(1000 * (question.timeout_s or declared.answer_timeout_s)),
            schema,
            question.url,
            question.state,
        )

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


class ToolRegistry:
    """All tools by name, with their shared resources: executors, HTTP connections, secrets to redact."""

    def __init__(
        self,
        tools: Mapping[str, ToolSettings],
        mcp: Mapping[str, McpSettings] | None = None,
        *,
        env: Mapping[str, str],
        message_bytes: int = LimitSettings().mcp_message_bytes,
        source: str = "settings",
        executors: PythonExecutors | None = None,
    ) -> None:
        """Raises SettingsError, naming the tool and the problem. ``source``: where the tools are declared.
        ``executors``: where Python tools run; None: in this process.
        """
        servers = mcp or {}
        self._executors = executors
        self._endpoints: list[EndpointTool] = []
        secret = named_secret(env)
        passed = {
            passed_value(name, env)
            for server in servers.values()
            if isinstance(server, McpStdio)
            for name in server.env_pass
        }
        self.redact_result = Redaction(secret)
        """Redacts secrets from tool results."""
        self.redact = Redaction(secret | passed)
        """Redacts secrets from error texts, and also everything passed to MCP servers. The latter may not be secret and
        so may appear in results.
        """
        self._declared = {name: self._declare(name, tool, env, source) for name, tool in tools.items()}
        self.mcp = _mcp_servers(servers, env, message_bytes, source, self._learn) if servers else None

    def _learn(self, secrets: Iterable[str]) -> None:
        found = list(secrets)
        for redaction in (self.redact_result, self.redact, LEARNED):
            redaction.learn(found)

    def get(self, name: str) -> Declared | None:
        """Return the tool of this name. Declared tools take precedence over those listed by MCP servers."""
        return self._declared.get(name) or (self.mcp.get(name) if self.mcp else None)

    @property
    def names(self) -> list[str]:
        return sorted({*self._declared, *(self.mcp.names if self.mcp else ())})

    @property
    def processes(self) -> int:
        """Number of processes in which Python tools run."""
        return self._executors.count if self._executors else 0

    async def open(self, liveness: Liveness | None = None) -> None:
        """Start the executors and the MCP servers, which list their tools later. Raises SettingsError if a Python tool
        cannot be loaded; OSError.
        """
        if self._executors:
            await self._executors.open(liveness or Liveness())
        if self.mcp:
            self.mcp.open(liveness or Liveness())

    async def aclose(self) -> None:
        """Close the connections, and stop the executors and the MCP servers that run as child processes."""
        if self._executors:
            await self._executors.close()
        if self.mcp:
            await self.mcp.aclose()
        for endpoint in self._endpoints:
            await endpoint.aclose()

    def _declare(self, name: str, settings: ToolSettings, env: Mapping[str, str], source: str) -> Declared:
        where = f"tools.{name}"
        if not NAME.fullmatch(name):
            raise SettingsError(source, where, "a tool name must have 1 to 64 letters, digits, _ or -")
        try:
            schema = compile_schema(settings.parameters)
        except SchemaError as e:
            raise SettingsError(source, f"{where}.parameters", str(e)) from None
        if settings.format and settings.parameters:
            raise SettingsError(source, f"{where}.format", "a tool has `parameters` or a `format`, not both")
        try:
            tool = self._tool(name, settings, env)
            answer_timeout_s = settings.answer_timeout_s if isinstance(settings, PythonTool) else 0.0
            return Declared(tool, schema, settings.timeout_s, settings.format is not None, answer_timeout_s)
        except ValueError as e:
            field = ".call" if isinstance(settings, PythonTool) else ""
            raise SettingsError(source, f"{where}{field}", str(e)) from e

    def _tool(self, name: str, settings: ToolSettings, env: Mapping[str, str]) -> Tool:
        match settings:
            case PythonTool():
                return PythonFunctionTool(name, settings, self._executors)
            case ClientTool():
                return _RunElsewhere("only a client of the run can execute this tool")
            case RunTool():
                return _RunElsewhere("this tool begins runs, and was declared otherwise when this run began")
            case HttpTool():
                endpoint = EndpointTool(name, settings, env, learn=self._learn)
                self._endpoints.append(endpoint)
                return endpoint


class _RunElsewhere:
    """A tool whose calls never come here, because they wait for a client's result or for that of a child run."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results, *, holding: Holding
    ) -> Text | ToolOutcome:
        raise ToolFailure(call.name, "unavailable", self._why)


def _mcp_servers(
    servers: Mapping[str, McpSettings], env: Mapping[str, str], message_bytes: int, source: str, learn: Learn
) -> McpServers:
    try:
        from tokenbus_services.tools.mcp.registry import McpServers
    except ModuleNotFoundError as e:
        problem = f"needs the extra `mcp` of tokenbus (from a checkout: pip install '.[services,mcp]'): {e}"
        raise SettingsError(source, f"mcp.{next(iter(servers))}", problem) from None
    return McpServers(servers, env=env, message_bytes=message_bytes, source=source, learn=learn)

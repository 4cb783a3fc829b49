"""All MCP servers of a deployment, and their tools as the executor calls them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import mcp_types as types
import msgspec
import structlog
from mcp.client import Transport

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import Liveness, wait_briefly
from tokenbus.bus.server.retry import Defects
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Tool
from tokenbus.tools import ToolContext
from tokenbus_services.net.outbound import Headers, Learn, egress_of, endpoint_url
from tokenbus_services.runtime.mcp_tool_cache import REFRESH_S, McpToolCache
from tokenbus_services.settings import McpHttp, McpSettings, McpStdio, Settings
from tokenbus_services.tools.mcp.rounds import Round
from tokenbus_services.tools.mcp.server import CLOSE_S, Connect, McpServer, outcome_of
from tokenbus_services.tools.mcp.task import Task
from tokenbus_services.tools.mcp.task_messages import TaskStarted
from tokenbus_services.tools.mcp.transports import child, endpoint
from tokenbus_services.tools.questions import Holding, Question
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool import NAME, Declared, check_passed, passed_environment
from tokenbus_services.tools.tool_call import ToolCall, ToolOutcome

START_S = 10.0
"""How long a call of a server's tool waits for the server's first list, and the worker's readiness for all of them."""

FIRST_AGAIN_S, LONGEST_AGAIN_S = 0.05, 2.0
"""How soon a call is sent again to a server that is not ready and asks nobody; the tool's timeout bounds it."""

_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


class McpServers:
    """Supervises the servers: one connection and one task each."""

    def __init__(
        self,
        servers: Mapping[str, McpSettings],
        *,
        env: Mapping[str, str] = os.environ,
        message_bytes: int,
        source: str = "settings",
        learn: Learn | None = None,
    ) -> None:
        """Raises SettingsError. ``source``: where the servers are declared. ``learn`` gets the secrets of headers."""
        self.listed = asyncio.Event()
        """Set after each listing of any server; the waiting task clears it."""
        prefixes = Settings(mcp=dict(servers)).mcp_prefixes
        self._settings = servers
        self._servers: dict[str, McpServer] = {}
        for name, settings in servers.items():
            try:
                self._servers[name] = McpServer(
                    name,
                    _prefix(name, prefixes),
                    _connector(name, settings, env, message_bytes, learn),
                    connect_timeout_s=settings.connect_timeout_s,
                    listed=self.listed.set,
                )
            except ValueError as e:
                raise SettingsError(source, f"mcp.{name}", str(e)) from None
        self._tasks: set[asyncio.Task[None]] = set()
        self._until = 0.0

    def get(self, name: str) -> Declared | None:
        """Return the tool that models know by this name."""
        for server in self._servers.values():
            if server.tools and (listed := server.tools.get(name)):
                settings = self._settings[server.name]
                tool = McpTool(server, listed.remote_name)
                return Declared(tool, listed.schema, settings.timeout_s, answer_timeout_s=settings.answer_timeout_s)
        return None

    @property
    def names(self) -> list[str]:
        """All tool names, as models know them."""
        return [name for server in self._servers.values() for name in server.tools or ()]

    @property
    def definitions(self) -> dict[str, list[Tool]]:
        """What each server listed, in the form of a request; without servers that have not listed anything yet."""
        return {
            server.name: [listed.definition for listed in server.tools.values()]
            for server in self._servers.values()
            if server.tools is not None
        }

    def open(self, liveness: Liveness) -> None:
        """Start all servers. They list their tools later."""
        self._until = process_clock.now() + START_S
        self._tasks = {liveness.start(server.keep(), name=f"mcp {server.name}") for server in self._servers.values()}

    @property
    def ready(self) -> bool:
        """Whether each server has listed its tools or failed to, or had `START_S` for it."""
        return process_clock.now() > self._until or all(server.tried.is_set() for server in self._servers.values())

    async def started(self, tool: str) -> None:
        """Wait until each server that may have this tool has listed its tools or failed to, or had `START_S` for it."""
        waiting = [server for server in self._servers.values() if tool.startswith(server.prefix)]
        with suppress(TimeoutError):
            async with process_clock.timeout(max(self._until - process_clock.now(), 0)):
                for server in waiting:
                    await server.tried.wait()

    async def give_up(self, call: ToolCall) -> None:
        """Cancel the task that a call has become, if its server has the tool and can be reached. Does not raise."""
        declared = self.get(call.name)
        if declared and isinstance(declared.tool, McpTool):
            await declared.tool.give_up(call)

    async def aclose(self) -> None:
        """Close all connections and child processes."""
        for _ in range(2):  # the second time for a connection that waits for its server to close
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_S)


class McpTool:
    def __init__(self, server: McpServer, remote_name: str) -> None:
        self._server = server
        self._remote_name = remote_name

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results, *, holding: Holding
    ) -> ToolOutcome | Question:
        """Call the tool and return the result, or what the server asks before. Raises ToolFailure."""

        async def report(progress: float, total: float | None, message: str | None) -> None:
            context.report(progress, total, message)

        responses: types.InputResponses | None = None
        state: str | None = None
        if call.state:
            asked = msgspec.json.decode(call.state, type=Round)
            if question := asked.next(call.answers):
                return question
            responses, state = asked.responses(call.name, call.answers), asked.state
            if asked.task:
                task = Task(self._server, call, asked.task, holding.task, [*asked.before, *asked.keys])
                return await task.result(context, results, responses or {})
        elif holding.task and (kept := await holding.task.find()):  # the worker that had the call before was lost
            return await Task(self._server, call, kept, holding.task).result(context, results)
        pause_s = FIRST_AGAIN_S
        while True:
            result = await self._server.call(
                *(call.name, self._remote_name, arguments, report),
                holding=holding,
                traceparent=call.traceparent,
                responses=responses,
                state=state,
            )
            if isinstance(result, types.CallToolResult):
                return await outcome_of(call.name, result, results)
            if isinstance(result, TaskStarted):
                task = Task(self._server, call, result.task_id, holding.task)
                return await task.begun(context, results, result)
            asked = Round.of(call.name, result, len(call.answers))
            if question := asked.next(call.answers):
                return question
            responses, state = None, asked.state  # it is not ready, and asks nobody
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_AGAIN_S)

    async def give_up(self, call: ToolCall) -> None:
        """Cancel the task that the call has become, if it has."""
        if task := msgspec.json.decode(call.state, type=Round).task:
            await self._server.cancel_task(call.name, task)


def _prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the server's prefix. Raises ValueError for invalid names and for a prefix used by two servers."""
    if not _SERVER_NAME.fullmatch(name):
        raise ValueError("a server name must have 1 to 32 letters, digits, _ or -")
    prefix = prefixes[name]
    if prefix and not NAME.fullmatch(prefix):
        raise ValueError("prefix: must have 1 to 64 letters, digits, _ or -, or be empty")
    if list(prefixes.values()).count(prefix) > 1:
        raise ValueError(f"prefix: {prefix!r} is also used by another server")
    return prefix


def _connector(
    name: str, settings: McpSettings, env: Mapping[str, str], message_bytes: int, learn: Learn | None
) -> Connect:
    """Raises ValueError, SettingsError if the settings are invalid."""
    match settings:
        case McpStdio():
            check_passed(settings.env_pass, env)
            command = (settings.command, *settings.args)

            def start(lost: Callable[[str], None]) -> Transport:
                passed = passed_environment(settings.env_pass, env)
                return child(name, command, passed, message_bytes=message_bytes, lost=lost)

            return start
        case McpHttp():
            url, headers = str(endpoint_url(settings.url)), Headers(settings, env, learn)
            connect = partial(endpoint, url, headers, egress_of(settings), message_bytes=message_bytes)
            return lambda lost: connect()


AGAIN_S = 0.5
"""First retry delay after a failed write; it doubles up to `REFRESH_S`."""

_log = structlog.stdlib.get_logger()


class McpLists:
    """Writes all lists from one task."""

    def __init__(self, servers: McpServers, lists: McpToolCache, liveness: Liveness | None = None) -> None:
        self._servers = servers
        self._lists = lists
        self._liveness = liveness or Liveness()
        self._task: asyncio.Task[None] | None = None
        self._defects = Defects()

    async def open(self) -> None:
        """Write the current lists and start refreshing them."""
        self._servers.listed.clear()
        await self._write()
        self._task = self._liveness.start(self._keep(), name="mcp lists")

    async def close(self) -> None:
        """Stop writing."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        due, again_s = clock() + REFRESH_S, AGAIN_S
        while True:
            if await wait_briefly(self._servers.listed, timeout_s=due - clock()) or clock() >= due:
                self._servers.listed.clear()
                if await self._write():
                    due, again_s = clock() + REFRESH_S, AGAIN_S
                else:
                    due, again_s = clock() + again_s, min(2 * again_s, REFRESH_S)

    async def _write(self) -> bool:
        """Write each list separately, so that one failure does not block the others. Returns whether all were written.

        Raises the error if none could be written several times in a row while the server answered.
        """
        failures: list[Exception] = []
        definitions = self._servers.definitions
        for name, tools in definitions.items():
            try:
                await self._lists.write(name, tools)
            except Exception as e:  # any exception: requests that name a tool need the lists
                failures.append(e)
                _log.warning("mcp_list_not_written", server=name, problem=str(e) or type(e).__name__)
                self._liveness.failed_work("mcp list")
        if failures and len(failures) == len(definitions):
            self._defects.count(failures[0])
        else:
            self._defects.none()
        return not failures

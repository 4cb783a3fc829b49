"""One MCP server, kept connected: started, listened to, and after a loss started again, later each time it fails.

A connection lives in one task of its own from beginning to end, for the package's task groups must be left by the task
that entered them. Calls come from other tasks and only use it. One that hangs, also while it closes, holds up the next
connection for a bounded time, and nothing else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import cast

import mcp_types as types
import structlog
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import ToolsListChanged
from mcp.shared.dispatcher import ProgressFnT
from pydantic import TypeAdapter

from tokenbus.bus.liveness import IDLE_S, beat, rest, wait_briefly
from tokenbus.errors import ToolFailure
from tokenbus_services.tools.mcp.listing import Listed, usable

RELIST_S = 60.0
"""Listed again so often unasked: a server may change without a word, and one behind HTTP may be gone without one."""
LIST_GAP_S = 1.0
"""At least so long between two listings, however often the server says that they changed."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
STEADY_S = 10.0
"""A connection that held for so long was none that failed: the next pause is the first again."""
MOST_PAGES = 64
CLOSE_S = 8.0
"""How long a connection may take to end well. Then it is cut short, and where that does not end it, left to itself."""
CUT_S = 2.0

_CALL_RESULT = TypeAdapter[types.CallToolResult | types.InputRequiredResult](
    types.CallToolResult | types.InputRequiredResult
)

Connect = Callable[[Callable[[str], None]], Transport]
"""Makes the transport of one connection; it may tell that the connection is lost."""

_log = structlog.stdlib.get_logger()


class ConnectionLost(Exception):
    """The server cannot be talked to any more."""


class McpServer:
    """Its tools, and its calls. All methods are for one event loop."""

    def __init__(
        self, name: str, prefix: str, connect: Connect, *, connect_timeout_s: float, listed: Callable[[], None]
    ) -> None:
        """``listed`` is told after each listing."""
        self.name = name
        self.tools: dict[str, Listed] | None = None
        """As last listed, kept while the server is away; None before the first listing."""
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended, well or not."""
        self._prefix = prefix
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._listed = listed
        self._client: Client | None = None
        self._connected_at: float | None = None
        self._problem = "it has not been started"
        self._wake = asyncio.Event()
        """Set when one of the next two changes."""
        self._lost: str | None = None
        self._changed = False
        self._due = 0.0
        """By then the connection has got on, in the event loop's time, or it hangs."""
        self._left: set[asyncio.Task[None]] = set()
        """Connections that did not end when they were cut short."""

    async def keep(self) -> None:
        """Be connected until cancelled."""
        pause = FIRST_PAUSE_S
        clock = asyncio.get_running_loop().time
        while True:
            self._connected_at = None
            try:
                await self._connected()
            except Exception as e:
                self._problem = _told(e)
            self.tried.set()
            if self._connected_at is not None and clock() - self._connected_at >= STEADY_S:
                pause = FIRST_PAUSE_S
            _log.warning("mcp_server_away", server=self.name, problem=self._problem, again_in_s=round(pause, 2))
            await rest(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def call(
        self, tool: str, remote_name: str, arguments: dict[str, object], progress: ProgressFnT
    ) -> types.CallToolResult:
        """The result. Raises ToolFailure; cancelled, it tells the server so."""
        client = self._client
        if client is None:
            problem = f"the MCP server {self.name!r} is not running and will be started again: {self._problem}"
            raise ToolFailure(tool, "unavailable", problem)
        params = types.CallToolRequestParams(name=remote_name, arguments=arguments)
        try:
            # Not `Client.call_tool`, which checks results with a validator whose patterns may backtrack for ever.
            result = await client.session.send_request(
                types.CallToolRequest(params=params), _CALL_RESULT, progress_callback=progress
            )
        except MCPError as e:
            if e.code == types.CONNECTION_CLOSED or e.message == "Session terminated":
                self._doubt()
            raise ToolFailure(tool, "mcp_error", f"MCP error {e.code}: {e.message}") from None
        except ValueError as e:  # pydantic's ValidationError is one; its text holds what the server sent
            problem = f"the server's answer is no result of a call: {type(e).__name__}"
            raise ToolFailure(tool, "bad_result", problem) from None
        except Exception as e:
            self._doubt()
            raise ToolFailure(tool, "unavailable", f"the MCP server was lost in the call: {_told(e)}") from None
        if isinstance(result, types.InputRequiredResult):
            raise ToolFailure(tool, "bad_result", "the tool asks for input that nobody can give it here")
        return result

    async def _connected(self) -> None:
        """One connection, until it has ended or hangs. Raises what ended it."""
        clock = asyncio.get_running_loop().time
        self._gets_on(self._connect_timeout_s)
        connection = asyncio.create_task(self._connection(), name=f"mcp connection {self.name}")
        try:
            while not (await asyncio.wait({connection}, timeout=IDLE_S))[0]:
                beat()
                if clock() > self._due:
                    raise ConnectionLost("its connection hangs")
        finally:
            self._client = None
            if not connection.done():
                await self._end(connection)
        connection.result()

    async def _end(self, connection: asyncio.Task[None]) -> None:
        """End it well, or cut it short, or leave it."""
        self._left.add(connection)
        connection.add_done_callback(self._has_ended)
        for patience_s in (CLOSE_S, CUT_S):
            connection.cancel()
            clock = asyncio.get_running_loop().time
            until = clock() + patience_s
            while not connection.done() and clock() < until:
                await asyncio.wait({connection}, timeout=min(IDLE_S, until - clock()))
                beat()
            if connection.done():
                return
        _log.warning("mcp_connection_left", server=self.name, seconds=CLOSE_S + CUT_S)

    def _has_ended(self, connection: asyncio.Task[None]) -> None:
        self._left.discard(connection)
        if not connection.cancelled():
            connection.exception()  # seen: nobody else is going to look

    def _gets_on(self, step_s: float) -> None:
        """The connection does something now that may take so long, and then may have to close."""
        self._due = asyncio.get_running_loop().time() + step_s + CLOSE_S

    async def _connection(self) -> None:
        """One connection from start to loss. Raises what ended it."""
        self._lost, self._changed = None, False
        self._wake.clear()
        async with AsyncExitStack() as stack:
            # No scope of anyio here: the client's own would outlive it.
            async with asyncio.timeout(self._connect_timeout_s):
                transport = self._connect(self._tell_lost)
                client = await stack.enter_async_context(
                    Client(transport, cache=None, message_handler=self._told_something)
                )
                await self._list(client)
            self._client = client
            self._connected_at = asyncio.get_running_loop().time()
            self.tried.set()
            listening = asyncio.create_task(self._listen(client), name=f"mcp listen {self.name}")
            try:
                await self._watch(client)
            finally:
                self._client = None
                self._gets_on(0)
                listening.cancel()
                await asyncio.wait({listening})

    async def _watch(self, client: Client) -> None:
        """List again when it is due. Raises ConnectionLost, or what a listing raises."""
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            due = last + (LIST_GAP_S if self._changed else RELIST_S)
            self._gets_on(self._connect_timeout_s)
            await wait_briefly(self._wake, timeout_s=due - clock())
            self._wake.clear()
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            if clock() - last >= (LIST_GAP_S if self._changed else RELIST_S):
                self._changed = False
                async with asyncio.timeout(self._connect_timeout_s):
                    await self._list(client)
                last = clock()

    async def _list(self, client: Client) -> None:
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        found = usable(self.name, self._prefix, tools)
        if found.keys() != (self.tools or {}).keys():
            _log.info("mcp_tools_listed", server=self.name, tools=sorted(found))
        self.tools = found
        self._listed()

    async def _listen(self, client: Client) -> None:
        """Hear of changes where the server tells them only to who asks (from protocol version 2026-07-28 on)."""
        capability = client.server_capabilities.tools
        if not (capability and capability.list_changed):
            return
        try:
            async with client.listen(tools_list_changed=True) as events:
                async for event in events:
                    if isinstance(event, ToolsListChanged):
                        self._tell_changed()
        except Exception as e:  # of whatever kind: it is listed every RELIST_S as any other
            _log.info("mcp_server_not_heard", server=self.name, problem=_told(e))

    async def _told_something(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._tell_changed()

    def _tell_changed(self) -> None:
        self._changed = True
        self._wake.set()

    def _tell_lost(self, problem: str) -> None:
        self._client = None
        self._problem = self._lost = problem
        self._wake.set()

    def _doubt(self) -> None:
        """A call failed as it would on a lost connection, or only with a code that servers use for that and for all
        else: to list the tools again shows which."""
        self._tell_changed()


def _told(error: Exception) -> str:
    """The first cause in words: the package wraps what broke in groups."""
    cause = error
    while isinstance(cause, ExceptionGroup):
        cause = cast("ExceptionGroup[Exception]", cause).exceptions[0]
    if isinstance(cause, TimeoutError):
        return "it did not answer in time"
    if isinstance(cause, ConnectionLost):
        return str(cause)
    return f"{type(cause).__name__}: {cause}".removesuffix(": ")[:500]

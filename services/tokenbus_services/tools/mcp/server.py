"""Keeps one MCP server connected: starts it, listens to it, and restarts it with backoff after a loss.

A connection lives in one task from start to end, because the package's task groups must be exited by the task that
entered them. Calls come from other tasks and only use it. A connection that hangs, even while closing, delays the next
one for a bounded time and affects nothing else.
"""

from __future__ import annotations

import asyncio
import binascii
import random
import re
from base64 import b64decode
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar, cast

import mcp_types as types
import msgspec
import structlog
from mcp import Client, MCPError, UrlElicitationRequiredError
from mcp.client import ClientRequestContext, Transport
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import ToolsListChanged
from mcp.shared.dispatcher import ProgressFnT
from pydantic import BaseModel, TypeAdapter

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, parse_media_type
from tokenbus.bus import process_clock
from tokenbus.bus.liveness import IDLE_S, beat, rest, wait_briefly
from tokenbus.errors import BlobRefused, ToolFailure
from tokenbus.events.requests import Tool
from tokenbus_services.json_schema import Schema, SchemaError, compile_schema
from tokenbus_services.tools.mcp.rounds import question_of, response_to
from tokenbus_services.tools.mcp.task_messages import (
    ACK,
    CANCEL_S,
    STATE,
    Tasks,
    TaskStarted,
    TaskState,
    cancel,
    get,
    update,
)
from tokenbus_services.tools.questions import Holding
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool import NAME
from tokenbus_services.tools.tool_call import ToolOutcome

MAX_TOOLS = 256
"""Maximum tools of one server."""
MAX_LISTED_BYTES = 2**20
"""Maximum size of all definitions of one server, as JSON."""
MAX_DESCRIPTION_CHARS = 8000

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


class Listed(NamedTuple):
    definition: Tool
    """As a request would list it."""
    remote_name: str
    """The server's own name for the tool."""
    schema: Schema


def usable(server: str, prefix: str, tools: Iterable[types.Tool]) -> dict[str, Listed]:
    """Return the usable tools by the names that models see. Others are skipped and logged.

    A name is the prefix plus the server's own name, with `_` in place of characters that providers do not accept.
    """
    found: dict[str, Listed] = {}
    room = MAX_LISTED_BYTES
    for tool in tools:
        name = prefix + _NOT_IN_A_NAME.sub("_", tool.name)
        description = (tool.description or tool.title or "")[:MAX_DESCRIPTION_CHARS]
        definition = Tool(name=name, description=description or None, parameters=tool.input_schema)
        try:
            schema = _check(definition, known=found)
            size = len(msgspec.json.encode(definition))
            if len(found) >= MAX_TOOLS or size > room:
                raise ValueError(f"over {MAX_TOOLS} tools or {MAX_LISTED_BYTES} bytes of definitions")
        except ValueError as e:
            _log.warning("mcp_tool_skipped", server=server, tool=tool.name[:80], problem=str(e))
            continue
        room -= size
        found[name] = Listed(definition, tool.name, schema)
    return found


def _check(definition: Tool, known: dict[str, Listed]) -> Schema:
    """Validate a tool and compile its schema. Raises ValueError."""
    if not NAME.fullmatch(definition.name):
        raise ValueError("with its prefix, the name must have 1 to 64 letters, digits, _ or -")
    if definition.name in known:
        raise ValueError("another tool of the server maps to the same name")
    try:
        return compile_schema(definition.parameters)
    except SchemaError as e:
        raise ValueError(f"inputSchema: {e}") from None


MAX_BLOBS = 16
"""Maximum blobs of one result; further content is only mentioned."""


async def outcome_of(tool: str, result: types.CallToolResult, results: Results) -> ToolOutcome:
    """Convert the parts in order, each on its own lines. Raises ToolFailure if the result is an error."""
    parts: list[ToolOutcome] = []
    kept = 0
    for part in result.content:
        match part:
            case types.ImageContent() | types.AudioContent():
                content, media_type = part.data, part.mime_type
            case types.EmbeddedResource(resource=types.BlobResourceContents() as resource):
                content, media_type = resource.blob, resource.mime_type
            case _:
                parts.append(ToolOutcome(_text(part)))
                continue
        kept += 1
        if kept > MAX_BLOBS:
            parts.append(ToolOutcome(f"[{(media_type or 'content')[:80]}, not kept: over {MAX_BLOBS} in one result]"))
        else:
            parts.append(await _blob(tool, content, media_type, results))
    if not parts and result.structured_content is not None:
        parts.append(ToolOutcome(msgspec.json.encode(result.structured_content).decode()))
    if result.is_error:
        whole = "\n".join(part.content for part in parts)
        raise ToolFailure(tool, "tool_error", whole or "the tool failed without an error message")
    return await results.joined(parts)


def _text(part: types.ContentBlock) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.ResourceLink():
            return f"[resource {part.name}: {part.uri}]"
        case _:
            return f"[{part.type}]"


async def _blob(tool: str, data: str, media_type: str | None, results: Results) -> ToolOutcome:
    try:
        content = b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ToolFailure(tool, "bad_result", "the result contains invalid base64") from None
    try:
        known = parse_media_type(media_type or DEFAULT_MEDIA_TYPE)
    except BlobRefused:
        known = DEFAULT_MEDIA_TYPE
    return await results.blob(content, known)


RELIST_S = 60.0
"""Interval of unsolicited listings: a server may change without notice, and one behind HTTP may disappear without
notice.
"""
LIST_GAP_S = 1.0
"""Minimum interval between two listings, however often the server announces changes."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
STEADY_S = 10.0
"""A connection that lasted this long counts as successful: the restart delay is reset."""
MAX_PAGES = 64
CLOSE_S = 8.0
"""How long a connection may take to close properly. After that it is cancelled, and if that fails, abandoned."""
CUT_S = 2.0

_CALL_RESULT = TypeAdapter[types.CallToolResult | types.InputRequiredResult | TaskStarted](
    types.CallToolResult | types.InputRequiredResult | TaskStarted
)
T = TypeVar("T", bound=BaseModel)

Connect = Callable[[Callable[[str], None]], Transport]
"""Creates the transport of one connection; the transport may report the connection as lost."""

_log = structlog.stdlib.get_logger()


class _Pages(Exception):
    """The call is refused until pages were visited."""

    def __init__(self, pages: UrlElicitationRequiredError) -> None:
        super().__init__()
        self.pages = pages


class ConnectionLost(Exception):
    """The connection to the server is lost."""


class McpServer:
    """One server's tools and calls. All methods must be called on one event loop."""

    def __init__(
        self, name: str, prefix: str, connect: Connect, *, connect_timeout_s: float, listed: Callable[[], None]
    ) -> None:
        """``listed`` is called after each listing."""
        self.name = name
        self.tools: dict[str, Listed] | None = None
        """The tools as last listed, kept while the server is unavailable; None before the first listing."""
        self.tried = asyncio.Event()
        """Set once the first connection attempt has finished, successfully or not."""
        self.prefix = prefix
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._listed = listed
        self._calls: set[tuple[str, Holding]] = set()
        """Calls in progress, each with its tool."""
        self._client: Client | None = None
        self._connected_at: float | None = None
        self._problem = "it has not been started yet"
        self._wake = asyncio.Event()
        """Set when one of the next two fields changes."""
        self._lost: str | None = None
        self._changed = False
        self._due = 0.0
        """Deadline for the connection's current step, by the process's clock; past it, the connection hangs."""
        self._left: set[asyncio.Task[None]] = set()
        """Connections that did not end when cancelled."""

    async def keep(self) -> None:
        """Stay connected until cancelled."""
        pause = FIRST_PAUSE_S
        clock = asyncio.get_running_loop().time
        while True:
            self._connected_at = None
            try:
                await self._connected()
            except Exception as e:
                self._problem = _describe(e)
            self.tried.set()
            if self._connected_at is not None and clock() - self._connected_at >= STEADY_S:
                pause = FIRST_PAUSE_S
            _log.warning("mcp_server_unavailable", server=self.name, problem=self._problem, again_in_s=round(pause, 2))
            await rest(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def call(
        self,
        tool: str,
        remote_name: str,
        arguments: dict[str, object],
        progress: ProgressFnT,
        *,
        holding: Holding,
        traceparent: str | None = None,
        responses: types.InputResponses | None = None,
        state: str | None = None,
    ) -> types.CallToolResult | types.InputRequiredResult | TaskStarted | UrlElicitationRequiredError:
        """Call a tool and return the result, what the server asks before, or the task that the call has become. Raises
        ToolFailure; if cancelled, notifies the server.

        ``holding`` asks what an older server asks in the middle of the call. ``responses``, ``state``: to the last
        round of what it asked before.
        """
        meta: types.RequestParamsMeta = {}
        if traceparent:
            meta["traceparent"] = traceparent
        params = types.CallToolRequestParams(
            name=remote_name,
            arguments=arguments,
            input_responses=responses,
            request_state=state,
            _meta=meta or None,
        )
        self._calls.add((tool, holding))
        try:
            # Not `Client.call_tool`, whose result validator may backtrack indefinitely.
            return await self._send(tool, types.CallToolRequest(params=params), _CALL_RESULT, progress)
        except _Pages as e:
            return e.pages
        finally:
            self._calls.discard((tool, holding))

    async def task_state(self, tool: str, task: str) -> TaskState:
        """The state of a call that has become a task. Raises ToolFailure."""
        return await self._send(tool, get(task), STATE)

    async def answer_task(self, tool: str, task: str, responses: types.InputResponses) -> None:
        """Give a task what it asked for; what it has already changes nothing. Raises ToolFailure."""
        await self._send(tool, update(task, responses), ACK)

    async def cancel_task(self, tool: str, task: str) -> None:
        """Cancel a task, unless its server cannot be reached at once."""
        try:
            async with process_clock.timeout(CANCEL_S):
                await self._send(tool, cancel(task), ACK)
        except (TimeoutError, ToolFailure) as e:
            _log.info("mcp_task_not_cancelled", server=self.name, tool=tool, problem=_describe(e))

    async def _send(
        self,
        tool: str,
        request: types.ClientRequest | types.Request[Any, Any],
        answer: TypeAdapter[T],
        progress: ProgressFnT | None = None,
    ) -> T:
        """Send a request of a call. Raises ToolFailure, and _Pages."""
        client = self._client
        if client is None:
            problem = f"the MCP server {self.name!r} is not running and will be started again: {self._problem}"
            raise ToolFailure(tool, "unavailable", problem)
        try:
            return await client.session.send_request(request, answer, progress_callback=progress)
        except MCPError as e:
            if pages := _pages_of(e):
                raise _Pages(pages) from None
            lost = e.code == types.CONNECTION_CLOSED or e.message == "Session terminated"
            if lost:
                self._check_connection()
            problem = f"MCP error {e.code}: {e.message}"
            raise ToolFailure(tool, "unavailable" if lost else "mcp_error", problem) from None
        except ValueError as e:  # includes pydantic's ValidationError, whose text contains what the server sent
            problem = f"the server's response is not a call result: {type(e).__name__}"
            raise ToolFailure(tool, "bad_result", problem) from None
        except Exception as e:
            self._check_connection()
            raise ToolFailure(tool, "unavailable", f"the MCP server was lost during the call: {_describe(e)}") from None

    async def _connected(self) -> None:
        """Run one connection until it ends or hangs. Raises what ended it."""
        self._begin_step(self._connect_timeout_s)
        connection = asyncio.create_task(self._connection(), name=f"mcp connection {self.name}")
        try:
            while not (await asyncio.wait({connection}, timeout=IDLE_S))[0]:
                beat()
                if process_clock.now() > self._due:
                    raise ConnectionLost("the connection hangs")
        finally:
            self._client = None
            if not connection.done():
                await self._end(connection)
        if connection.cancelled():  # by the package itself, not because this worker was asked to stop
            raise ConnectionLost("the connection was cut off")
        connection.result()

    async def _end(self, connection: asyncio.Task[None]) -> None:
        """Close the connection properly, or cancel it, or abandon it."""
        self._left.add(connection)
        connection.add_done_callback(self._has_ended)
        for patience_s in (CLOSE_S, CUT_S):
            connection.cancel()
            until = process_clock.now() + patience_s
            while not connection.done() and (left := until - process_clock.now()) > 0:
                await asyncio.wait({connection}, timeout=min(IDLE_S, left))
                beat()
            if connection.done():
                return
        _log.warning("mcp_connection_not_closed", server=self.name, seconds=CLOSE_S + CUT_S)

    def _has_ended(self, connection: asyncio.Task[None]) -> None:
        self._left.discard(connection)
        if not connection.cancelled():
            connection.exception()  # retrieved here, because nothing else awaits the task

    def _begin_step(self, step_s: float) -> None:
        """Start a step of the connection that may take ``step_s``, after which it may have to close."""
        self._due = process_clock.now() + step_s + CLOSE_S

    async def _connection(self) -> None:
        """Run one connection from start to loss. Raises what ended it."""
        self._lost, self._changed = None, False
        self._wake.clear()
        async with AsyncExitStack() as stack:
            # No anyio scope here: the client's own would outlive it.
            async with process_clock.timeout(self._connect_timeout_s):
                transport = self._connect(self._on_lost)
                client = await stack.enter_async_context(
                    Client(
                        transport,
                        cache=None,
                        message_handler=self._on_message,
                        elicitation_callback=self._on_question,
                        extensions=[Tasks()],
                    )
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
                self._begin_step(0)
                listening.cancel()
                await asyncio.wait({listening})

    async def _watch(self, client: Client) -> None:
        """List the tools again when due. Raises ConnectionLost, or any exception of a listing."""
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            due = last + (LIST_GAP_S if self._changed else RELIST_S)
            self._begin_step(self._connect_timeout_s)
            await wait_briefly(self._wake, timeout_s=due - clock())
            self._wake.clear()
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            if clock() - last >= (LIST_GAP_S if self._changed else RELIST_S):
                self._changed = False
                async with process_clock.timeout(self._connect_timeout_s):
                    await self._list(client)
                last = clock()

    async def _list(self, client: Client) -> None:
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        found = usable(self.name, self.prefix, tools)
        if found.keys() != (self.tools or {}).keys():
            _log.info("mcp_tools_listed", server=self.name, tools=sorted(found))
        self.tools = found
        self._listed()

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes, if the server sends them only to subscribers (protocol version 2026-07-28 and
        later).
        """
        capability = client.server_capabilities.tools
        if not (capability and capability.list_changed):
            return
        try:
            async with client.listen(tools_list_changed=True) as events:
                async for event in events:
                    if isinstance(event, ToolsListChanged):
                        self._on_changed()
        except Exception as e:  # any exception: the periodic listing still works
            _log.info("mcp_change_notices_failed", server=self.name, problem=_describe(e))

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._on_changed()

    async def _on_question(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        """Ask what a server of an older version asks. It does not say for which call, so there must be one alone."""
        if len(self._calls) != 1:
            problem = f"{len(self._calls)} calls are in progress, and one of them cannot be asked for"
            return types.ErrorData(code=types.INVALID_REQUEST, message=problem)
        ((tool, holding),) = self._calls
        question = question_of(params)
        try:
            return response_to(tool, question, await holding.ask(question))
        except ToolFailure as e:
            return types.ErrorData(code=types.INVALID_REQUEST, message=e.problem)

    def _on_changed(self) -> None:
        self._changed = True
        self._wake.set()

    def _on_lost(self, problem: str) -> None:
        self._client = None
        self._problem = self._lost = problem
        self._wake.set()

    def _check_connection(self) -> None:
        """Handle a call failure that may mean a lost connection: list the tools again to find out."""
        self._on_changed()


def _pages_of(error: MCPError) -> UrlElicitationRequiredError | None:
    """The pages that must be visited before the call, if that is the error."""
    if error.code != types.URL_ELICITATION_REQUIRED:
        return None
    try:
        found = UrlElicitationRequiredError.from_error(error.error)
    except (ValueError, TypeError, AttributeError):  # includes pydantic's ValidationError
        return None
    return found if found.elicitations else None


def _describe(error: Exception) -> str:
    """Describe the first cause: the package wraps errors in exception groups."""
    cause = error
    while isinstance(cause, ExceptionGroup):
        cause = cast("ExceptionGroup[Exception]", cause).exceptions[0]
    if isinstance(cause, TimeoutError):
        return "it did not answer in time"
    if isinstance(cause, ConnectionLost):
        return str(cause)
    return f"{type(cause).__name__}: {cause}".removesuffix(": ")[:500]

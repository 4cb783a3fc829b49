"""Takes requests in: validates them, gives ids, makes runs. A repeated request is the same run.

What cannot be taken is told: a request with a readable id ends as a `failed` run, any other goes to the dead
stream with its bytes and the reason. Nothing here stops on a bad request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import structlog

from tokenbus.bus import scripts
from tokenbus.bus.dead import DeadEntry, bury
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.outage import outlast
from tokenbus.bus.queue import Item, Queue
from tokenbus.bus.send import send_many
from tokenbus.bus.server import Server
from tokenbus.core.ids import id_of_entry
from tokenbus.core.intake import check_request, decode_request, rejected_run_id
from tokenbus.core.prefill.setting import reading_of
from tokenbus.errors import RequestInvalid, TokenbusError
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    CancelAsked,
    Control,
    EventFrame,
    Rejected,
    Rules,
    TurnWork,
    encode,
)
from tokenbus.events.requests import Cancel, Generate, Tool
from tokenbus_services.settings import Settings
from tokenbus_services.tools.schemas import check_output, check_tools
from tokenbus_services.worker.listed_tools import ListedTools

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AWAITED_MS = 60_000
"""How long a cancel waits for a run that is not known yet: its request may be in another intake's hands."""


class Intake:
    """Takes items of the inbound stream in. Each ends in one script: a crash and a second delivery change nothing."""

    def __init__(
        self,
        server: Server,
        settings: Settings,
        queue: Queue,
        *,
        providers: Callable[[str], object],
        tools: Sequence[Tool],
    ) -> None:
        """``providers`` raises SettingsError for a name that is not configured; ``tools`` are those that the
        deployment declares: a request may name one, or one that an MCP server lists, without repeating its schema."""
        self._server = server
        self._settings = settings
        self._keys: Keys = settings.keys
        self._queue = queue
        self._providers = providers
        self._tools = {tool.name: tool for tool in tools}
        self._mcp_prefixes = settings.mcp_prefixes
        self._listed = ListedTools(server, settings.keys)
        limits, retry = settings.limits, settings.retry
        self._rules = Rules(
            retry.max_attempts,
            retry.max_losses,
            round(retry.base_delay_s * 1000),
            round(retry.max_delay_s * 1000),
            limits.block_bytes,
            limits.run_events,
        )

    async def take(self, items: Sequence[Item]) -> None:
        """Take these requests in; returns when each is a run, a cancel, or told as refused."""
        calls: list[scripts.Call] = []
        for item in items:
            try:
                calls.append(await self._call(item))
            except TokenbusError as e:
                if call := self._reject(item, e):
                    calls.append(call)
                await self._bury(item, e)
        if calls:
            await outlast(lambda: send_many(self._server, calls), what="intake")
        await self._queue.finish(items)

    async def _call(self, item: Item) -> scripts.Call:
        request = decode_request(item.fields, limit=self._settings.limits.request_bytes)
        if isinstance(request, Cancel):
            return self._cancel(request)
        check_request(request)
        try:
            self._providers(request.provider)
        except TokenbusError as e:
            raise RequestInvalid("provider", str(e)) from None
        request = await self._with_tools(request)
        check_tools(request.tools)
        check_output(request.output_schema)
        return self._accept(request, item)

    async def _with_tools(self, request: Generate) -> Generate:
        """Tools that the request only names, with the description and schema that the deployment has for them."""
        known = [t if t.parameters else await self._tool(t, f"tools[{i}]") for i, t in enumerate(request.tools)]
        return msgspec.structs.replace(request, tools=known)

    async def _tool(self, tool: Tool, where: str) -> Tool:
        """What the deployment knows of this tool. Raises RequestInvalid for one that its MCP server does not list."""
        if tool.name in self._tools:
            return self._tools[tool.name]
        problem = None
        for server, prefix in self._mcp_prefixes.items():
            if tool.name.startswith(prefix):
                listed = await outlast(partial(self._listed.read, server), what="tools of MCP servers")
                if listed and tool.name in listed:
                    return listed[tool.name]
                if prefix:
                    lists = f"lists no tool {tool.name[len(prefix) :]!r}" if listed else "has listed no tools yet"
                    problem = f"the MCP server {server!r} {lists}"
        if problem:
            raise RequestInvalid(where, problem)
        return tool

    def _accept(self, request: Generate, item: Item) -> scripts.Call:
        # Without an id of its own the request takes the entry's, so that a second delivery is the same run.
        run = request.id or id_of_entry(item.stream, item.entry_id)
        now = time.time_ns() // 1_000_000
        accepted = Accepted(
            request.provider,
            request.model,
            request.on_failure,
            request.max_tool_depth,
            self._rules,
            [t.name for t in request.tools],
            request.tool_timeout_s,
            request.metadata,
            reading_of(request),
        )
        fields: list[scripts.Arg] = ["request", msgspec.json.encode(request), "accepted", now]
        if request.deadline_s:
            fields += ["deadline", now + round(request.deadline_s * 1000)]
        return self._make(run, EventFrame(0, CONTROL_ATTEMPT, now, [accepted]), encode(TurnWork(run, 0, 1)), fields)

    def _make(self, run: str, frame: EventFrame, work: bytes, fields: list[scripts.Arg]) -> scripts.Call:
        keys, partition = self._keys, self._keys.partition_of(run)
        return scripts.accept(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.topic(partition, "turns"),
            keys.lease(partition, "parser"),
            keys.log(run),
            run=run,
            ttl_ms=round(self._settings.retention.open_run_s * 1000),
            frame=encode(frame),
            work=work,
            fields=fields,
        )

    def _reject(self, item: Item, error: TokenbusError) -> scripts.Call | None:
        run = rejected_run_id(item.fields)
        log.info("request_rejected", run=run, code=error.code, where=getattr(error, "where", None))
        if run is None:
            return None
        where = getattr(error, "where", None)
        info = ErrorInfo(code=error.code, kind="invalid_request", message=str(error), where=where)
        now = time.time_ns() // 1_000_000
        return self._make(run, EventFrame(0, CONTROL_ATTEMPT, now, [Rejected(info)]), b"", ["accepted", now])

    async def _bury(self, item: Item, error: TokenbusError) -> None:
        entry = DeadEntry(
            reason=f"{error.code}: {error}",
            stage="intake",
            stream=item.stream,
            entry=item.entry_id,
            bytes=item.fields.get(DATA_FIELD.encode(), b"")[: self._settings.limits.request_bytes],
        )
        await bury(self._server, self._keys, entry, most=self._settings.retention.dead_entries)

    def _cancel(self, request: Cancel) -> scripts.Call:
        keys, run = self._keys, request.run
        partition = keys.partition_of(run)
        now = time.time_ns() // 1_000_000
        asked = CancelAsked(request.reason, request.heard_through)
        return scripts.cancel(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.topic(partition, "raw"),
            keys.topic(partition, "control"),
            parser_lease=keys.lease(partition, "parser"),
            normalizer_lease=keys.lease(partition, "normalizer"),
            run=run,
            awaited_ms=AWAITED_MS,
            frame=encode(EventFrame(0, CONTROL_ATTEMPT, now, [asked])),
            control_frame=encode(Control(run)),
        )

"""Takes requests in: validates them, gives ids, makes runs. A repeated request is the same run.

What cannot be taken is told: a request with a readable id ends as a `failed` run, any other goes to the dead
stream with its bytes and the reason. Nothing here stops on a bad request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import structlog
from redis.exceptions import ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.dead import DeadEntry, bury
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.outage import outlast
from tokenbus.bus.queue import Item, Queue
from tokenbus.bus.scripts.runs import ASKED
from tokenbus.bus.send import send, send_many
from tokenbus.bus.server import Server
from tokenbus.core.continuation import CONTINUES, continues
from tokenbus.core.ids import id_of_entry
from tokenbus.core.intake import check_request, decode_request, rejected_run_id
from tokenbus.core.prefill.setting import reading_of
from tokenbus.core.tenant import tenant_of
from tokenbus.errors import PoisonRequest, RequestInvalid, TokenbusError
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    CancelAsked,
    Control,
    EventFrame,
    Policing,
    Rejected,
    Rules,
    TextReading,
    TurnWork,
    encode,
)
from tokenbus.events.requests import Cancel, Generate, Tool
from tokenbus_services.fetcher.media_intake import IntakeMedia
from tokenbus_services.fetcher.policies import Routes
from tokenbus_services.fetcher.recorded import is_recorded
from tokenbus_services.settings import Settings
from tokenbus_services.tools.schemas import check_output, check_tools
from tokenbus_services.worker.listed_tools import ListedTools

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AWAITED_MS = 60_000
"""How long a cancel waits for a run that is not known yet: its request may be in another intake's hands."""
MOST_DELIVERIES = 4
"""A request on which so many workers died is not tried again."""


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
        media: IntakeMedia,
    ) -> None:
        """``providers`` raises SettingsError for a name that is not configured; ``tools`` are those that the
        deployment declares: a request may name one, or one that an MCP server lists, without repeating its schema."""
        self._server = server
        self._settings = settings
        self._routes = Routes(settings)
        self._keys: Keys = settings.keys
        self._queue = queue
        self._providers = providers
        self._tools = {tool.name: tool for tool in tools}
        self._mcp_prefixes = settings.mcp_prefixes
        self._listed = ListedTools(server, settings.keys)
        self._media = media
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
        """Take these requests in; returns when each is a run, a cancel, or told as refused.

        Those whose worker was lost go one at a time and in order: should one of them be what kills workers, it is the
        first of those that come back, and after `MOST_DELIVERIES` it is not tried again.
        """
        if fresh := [item for item in items if item.deliveries == 1]:
            await self._take(fresh)
        for n, item in enumerate(item for item in items if item.deliveries > 1):
            if n == 0 and item.deliveries > MOST_DELIVERIES:
                await self._refuse(item, PoisonRequest(item.deliveries - 1))
                await self._queue.finish([item])
            else:
                await self._take([item])

    async def _take(self, items: Sequence[Item]) -> None:
        calls: list[tuple[Item, scripts.Call]] = []
        refused: list[tuple[Item, Exception]] = []
        # Side by side: one may have large media to store. Whatever is wrong with one, the requests beside it go on.
        taken = await asyncio.gather(*(self._call(item) for item in items), return_exceptions=True)
        for item, call in zip(items, taken, strict=True):
            if isinstance(call, Exception):
                refused.append((item, call))
                if rejection := self._reject(item, call):
                    calls.append((item, rejection))
            elif isinstance(call, BaseException):
                raise call
            else:
                calls.append((item, call))
        sent = await self._send(calls)  # first: however many are bad, the good ones do not wait for it
        for item, error in refused:
            await self._bury(item, error)
        await self._queue.finish(items, again=lambda: self._send_again(sent))

    async def _send(self, calls: Sequence[tuple[Item, scripts.Call]]) -> list[scripts.Call]:
        """Those that the server took; the others are buried."""
        sent = [call for _, call in calls]
        try:
            await self._send_again(sent)
        except ResponseError:
            # One of them is at fault, a key of its run being of another type, say. Each bears being sent again.
            for item, call in calls:
                try:
                    await outlast(lambda call=call: send(self._server, call), what="intake")
                except ResponseError as e:
                    sent.remove(call)
                    await self._bury(item, e)
        return sent

    async def _send_again(self, calls: Sequence[scripts.Call]) -> None:
        await outlast(lambda: send_many(self._server, calls), what="intake")

    async def _refuse(self, item: Item, error: Exception) -> None:
        """Its run, if it names one, ends `failed`; its bytes go to the dead stream."""
        if call := self._reject(item, error):
            await self._send([(item, call)])
        await self._bury(item, error)

    async def _call(self, item: Item) -> scripts.Call:
        request = decode_request(item.fields, limit=self._settings.limits.request_bytes)
        if isinstance(request, Cancel):
            return self._cancel(request)
        check_request(request)
        try:
            self._providers(request.provider)
        except TokenbusError as e:
            raise RequestInvalid("provider", str(e)) from None
        if request.record and self._settings.records is None:
            raise RequestInvalid("record", "this deployment records nothing: its settings have no [records]")
        request = await self._with_tools(request)
        check_tools(request.tools)
        check_output(request.output_schema)
        policing = await self._policing(request)
        return self._accept(await self._media.taken(request), item, policing)

    async def _policing(self, request: Generate) -> Policing | None:
        """The run's policies; none, whatever its routes, where a policy asks for it."""
        policing = self._routes.policing_of(request)
        if policing and request.id:
            key = self._keys.run(request.id)
            if await outlast(lambda: self._server.client.hget(key, ASKED), what="look-up of a policy's question"):
                return None
        return policing

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

    def _accept(self, request: Generate, item: Item, policing: Policing | None) -> scripts.Call:
        # Without an id of its own the request takes the entry's, so that a second delivery is the same run.
        run = request.id or id_of_entry(item.stream, item.entry_id)
        now = time.time_ns() // 1_000_000
        deadline_ms = now + round(request.deadline_s * 1000) if request.deadline_s else 0
        goes_on = self._continues(request)
        accepted = Accepted(
            request.provider,
            request.model,
            request.on_failure,
            request.max_tool_depth,
            self._rules,
            [t.name for t in request.tools],
            request.tool_timeout_s,
            request.metadata,
            self._reading(request),
            goes_on and request.on_failure == "continue",
            deadline_ms,
            tuple(request.stop) if request.mode == "chat" else (),
            is_recorded(run, request, self._settings.records),
            policing,
            request.visible,
        )
        fields: list[scripts.Arg] = ["request", msgspec.json.encode(request), "accepted", now]
        # For `Client.resume`, which knows the provider's name alone.
        fields += [CONTINUES, int(goes_on)]
        if accepted.record and self._settings.records:
            fields += ["record", self._settings.records.raw_bytes]
        if deadline_ms:
            fields += ["deadline", deadline_ms]
        work = TurnWork(run, 0, 1, tenant=tenant_of(request.metadata), held=policing is not None)
        return self._make(run, EventFrame(0, CONTROL_ATTEMPT, now, [accepted]), encode(work), fields)

    def _continues(self, request: Generate) -> bool:
        """Whether provider and model can go on from the partial text of a broken turn."""
        vendor = self._settings.providers[request.provider]
        return continues(request, vendor.api, vendor.quirks.of(request.model))

    def _reading(self, request: Generate) -> TextReading | None:
        """How the model's text is read; None in chat mode, where the provider's own structure gives the blocks."""
        if request.mode == "chat":
            return None
        vendor = self._settings.providers[request.provider]
        return reading_of(request, vendor.api, vendor.quirks)

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

    def _reject(self, item: Item, error: Exception) -> scripts.Call | None:
        run = rejected_run_id(item.fields)
        where: str | None = getattr(error, "where", None)
        if isinstance(error, TokenbusError):
            log.info("request_rejected", run=run, code=error.code, where=where)
            info = ErrorInfo(code=error.code, kind="invalid_request", message=str(error), where=where)
        else:
            log.error("request_poisoned", run=run, entry=item.entry_id, exc_info=error)
            info = ErrorInfo(code="poison", kind="internal", message=_reason(error), where=f"intake {item.entry_id}")
        if run is None:
            return None
        now = time.time_ns() // 1_000_000
        return self._make(run, EventFrame(0, CONTROL_ATTEMPT, now, [Rejected(info)]), b"", ["accepted", now])

    async def _bury(self, item: Item, error: Exception) -> None:
        data = item.fields.get(DATA_FIELD.encode())
        entry = DeadEntry(
            reason=_reason(error),
            stage="intake",
            stream=item.stream,
            entry=item.entry_id,
            bytes=msgspec.msgpack.encode(item.fields) if data is None else data,
            run=rejected_run_id(item.fields),
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


def _reason(error: Exception) -> str:
    return f"{error.code if isinstance(error, TokenbusError) else type(error).__name__}: {error}"

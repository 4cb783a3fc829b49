"""Accepts requests: validates them, assigns ids, opens runs. A repeated request is the same run.

Rejected requests are reported: one with a readable id becomes a `failed` run; any other goes to the dead-letter stream
with its bytes and the reason. A bad request never stops intake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import DATA_FIELD, TENANT_FIELD, Keys
from tokenbus.bus.layout import changed, locate
from tokenbus.bus.liveness import beating
from tokenbus.bus.run_record import ASKED, CONTINUES, DEADLINE, MODEL, PROVIDER, RECORD, REQUEST, TENANT
from tokenbus.bus.scripts.runs import STALE
from tokenbus.bus.server.retry import ISOLATED_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.unreadable import type_and_id
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.core.nearest_name import nearest
from tokenbus.core.prefill.options import reading_of
from tokenbus.core.request.fallback import all_choices
from tokenbus.core.request.parse import decode_with_notes, rejected_run_id
from tokenbus.core.request.run_id import id_of_entry
from tokenbus.core.request.tenant import MAX_TENANT_CHARS, tenant_of
from tokenbus.errors import PoisonRequest, RequestError, RequestInvalid, TokenbusError, WireError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    EventFrame,
    FallbackPlan,
    PolicyPlan,
    Rejected,
    RunLimits,
    TextReading,
    TurnWork,
    encode,
)
from tokenbus.events.requests import Cancel, Generate, Tool
from tokenbus.providers.continuing import continues
from tokenbus_services.intake.blob_offload import IntakeMedia
from tokenbus_services.intake.cancels import Cancels
from tokenbus_services.intake.fallbacks import Callee, Fallbacks
from tokenbus_services.intake.intake_spans import IntakeSpans
from tokenbus_services.intake.policy_routes import PolicyRoutes
from tokenbus_services.intake.record_sampling import is_recorded
from tokenbus_services.json_schema.check import check_output, check_tools
from tokenbus_services.runtime.mcp_tool_cache import McpToolCache
from tokenbus_services.runtime.task_failures import LoggedTasks
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MEDIA_S = 30.0
"""Time limit for storing the media of the requests of one read, if the store is slow (`media_intake`)."""
MAX_BACKGROUND = 1024
ALONE_S = 1.0
"""Cluster: how long a request that may kill its workers is processed alone."""
MAX_DELIVERIES = 4
"""A request that has killed this many workers is not tried again."""


class Intake:
    """Accepts items of the inbound stream. Each ends in one script, so a crash or a second delivery changes nothing."""

    def __init__(
        self,
        server: Server,
        settings: Settings,
        queue: WorkQueue,
        cancels: Cancels,
        *,
        providers: Callable[[str], Callee],
        tools: Sequence[Tool],
        media: IntakeMedia,
        spans: IntakeSpans | None = None,
    ) -> None:
        """``providers`` raises SettingsError for a name that is not configured. ``tools``: the tools that the
        deployment declares. A request may name one of them, or one that an MCP server lists, without repeating its
        schema.
        """
        self._server = server
        self._settings = settings
        self._routes = PolicyRoutes(settings)
        self._keys: Keys = settings.keys
        self._queue = queue
        self._background_tasks = LoggedTasks("intake", most=MAX_BACKGROUND)
        self._cancels = cancels
        self._providers = providers
        self._fallbacks = Fallbacks(settings.fallback_routes, providers)
        self._tools = {tool.name: tool for tool in tools}
        self._mcp_prefixes = settings.mcp_prefixes
        self._listed = McpToolCache(server, settings.keys)
        self._media = media
        self._spans = spans
        limits, retry = settings.limits, settings.retry
        self._rules = RunLimits(
            retry.max_attempts,
            retry.max_losses,
            round(retry.base_delay_s * 1000),
            round(retry.max_delay_s * 1000),
            limits.block_characters,
            limits.run_input_events,
            limits.turn_bytes,
            limits.run_bytes,
        )

    async def accept(self, items: Sequence[QueueItem]) -> None:
        """Accept these requests; returns when each is a run, a cancel, or reported as refused.

        In a Cluster, requests whose node does not answer continue in the background, up to `MOST_ASIDE`, and delay no
        others.

        Requests of lost workers are processed one at a time, in order: if one of them kills workers, it is the first to
        be redelivered, and it is given up after `MOST_DELIVERIES`.
        """
        if fresh := [item for item in items if item.deliveries == 1]:
            if self._server.topology == "cluster":
                await self._background_tasks.run(partial(self._take, [item]) for item in fresh)
            else:
                await self._take(fresh)
        for n, item in enumerate(item for item in items if item.deliveries > 1):
            if n == 0 and item.deliveries > MAX_DELIVERIES:
                take = partial(self._give_up, item)
            else:
                take = partial(self._take, [item])
            if self._server.topology == "cluster":
                await self._background_tasks.run([take], patience_s=ALONE_S)
            else:
                await take()

    async def unreadable(self, item: QueueItem, error: Exception) -> None:
        """Handle a request that breaks every connection it is read on.

        Its run ends as `failed` if the id can be read without the rest of the entry. That is not possible for a msgpack
        map or inside FastStream's JSON envelope.
        """
        named: dict[bytes, bytes] = {}
        try:
            kind, run = await type_and_id(self._server, item.stream, item.entry_id)
            named[DATA_FIELD.encode()] = msgspec.json.encode({"type": kind, "id": run or None})
        except (RedisError, OSError) as e:
            log.warning("id_not_found", entry=item.entry_id, problem=str(e))
        problem = UnreadableEntry(str(error) or type(error).__name__)
        await self._end(msgspec.structs.replace(item, fields=named), problem)
        await self.dead_letter(item, problem, run=rejected_run_id(named))

    async def close(self) -> None:
        """Stop; other workers take over unfinished work."""
        await self._background_tasks.close()

    async def _give_up(self, item: QueueItem) -> None:
        await self._refuse(item, PoisonRequest(item.deliveries - 1))
        await self._queue.finish([item])

    async def _take(self, items: Sequence[QueueItem]) -> None:
        epoch = self._keys.epoch
        calls: list[tuple[QueueItem, scripts.ScriptCall]] = []
        refused: list[tuple[QueueItem, Exception]] = []
        # Concurrently, because one may have large media to store. Errors of one request do not affect the others.
        taken = await beating(self._calls(items), most_s=MEDIA_S)
        for item, call in zip(items, taken, strict=True):
            if isinstance(call, Exception):
                refused.append((item, call))
                await self._locate(rejected_run_id(item.fields))
                if rejection := self._reject(item, call):
                    calls.append((item, rejection))
            elif isinstance(call, BaseException):
                raise call
            else:
                calls.append((item, call))
        sent, stale = await self._send(calls)  # first, so that good requests do not wait for bad ones
        for item, error in refused:
            if item not in stale:
                await self.dead_letter(item, error)
        await self._queue.finish([item for item in items if item not in stale], again=lambda: self._repeat(sent))
        if stale:  # runs are placed by another number of partitions since
            await changed(self._keys, epoch)
            await self._take(stale)

    async def _calls(self, items: Sequence[QueueItem]) -> list[scripts.ScriptCall | BaseException]:
        return await asyncio.gather(*(self._call(item) for item in items), return_exceptions=True)

    async def _send(
        self, calls: Sequence[tuple[QueueItem, scripts.ScriptCall]]
    ) -> tuple[list[scripts.ScriptCall], list[QueueItem]]:
        """Send the calls; return those that the server accepted, and the items whose calls came too late (`STALE`). The
        others are dead-lettered.
        """
        sent = [call for _, call in calls]
        stale: list[QueueItem] = []
        try:
            replies = await self._resend(sent)
            stale = [item for (item, _), reply in zip(calls, replies, strict=True) if reply == STALE]
        except (RedisError, OSError):
            # One of them is at fault, for example a key of its run has the wrong type. All are safe to send again.
            for item, call in calls:
                try:
                    if await self._send_individually(call) == STALE:
                        stale.append(item)
                except (RedisError, OSError) as e:
                    sent.remove(call)
                    await self.dead_letter(item, e)
                    await self._end(item, e)
        return sent, stale

    async def _send_individually(self, call: scripts.ScriptCall) -> object:
        return await retry_until_available(
            self._server, lambda: run_script(self._server, call), what="intake", tries=ISOLATED_TRIES
        )

    async def _end(self, item: QueueItem, error: Exception) -> None:
        """End the run of a refused request as `failed`, if the server accepts at least that."""
        if call := self._reject(item, error):
            try:
                await self._send_individually(call)
            except (RedisError, OSError):
                log.exception("run_not_ended", run=rejected_run_id(item.fields), entry=item.entry_id)

    async def _resend(self, calls: Sequence[scripts.ScriptCall]) -> list[object]:
        return await retry_until_available(self._server, lambda: run_scripts(self._server, calls), what="intake")

    async def _repeat(self, calls: Sequence[scripts.ScriptCall]) -> None:
        await self._resend(calls)

    async def _refuse(self, item: QueueItem, error: Exception) -> None:
        """End its run as `failed`, if it names one, and dead-letter its bytes."""
        if call := self._reject(item, error):
            await self._send([(item, call)])
        await self.dead_letter(item, error)

    async def _call(self, item: QueueItem) -> scripts.ScriptCall:
        request, unknown = decode_with_notes(item.fields, limit=self._settings.limits.request_bytes)
        if isinstance(request, Cancel):
            await self._locate(request.run)
            return self._cancels.call(request, await self._cancels.awaited_ms())
        try:
            self._providers(request.provider)
        except TokenbusError as e:
            raise RequestInvalid("provider", str(e)) from None
        if request.record and self._settings.records is None:
            raise RequestInvalid("record", "this deployment records nothing: its settings have no [records]")
        request = await self._with_tools(self._with_true_names(request))
        check_tools(request.tools)
        check_output(request.output_schema)
        request, notes = self._fallbacks.resolve(request)
        await self._locate(_run_of(request, item))
        policing = await self._policy_plan(request)
        return self._accept(await self._media.offload(request), item, policing, [*unknown, *notes])

    async def _locate(self, run: str | None) -> None:
        """Note where the run is: it may exist by an earlier number of partitions, as this request's or a cancel's."""
        if run is not None:
            await retry_until_available(
                self._server, lambda: locate(self._server, self._keys, run), what="look-up of a run's partition"
            )

    async def _policy_plan(self, request: Generate) -> PolicyPlan | None:
        """Return the run's policies; None, whatever its routes, if a policy published the request."""
        policing = self._routes.plan_for(request)
        if policing and request.id:
            key = self._keys.run(request.id)
            if await retry_until_available(
                self._server, lambda: self._server.client.hget(key, ASKED), what="look-up of a policy's question"
            ):
                return None
        return policing

    def _with_true_names(self, request: Generate) -> Generate:
        """Return the request with aliases resolved to the model names that limits, routes and quirks use."""

        def true(provider: str, model: str) -> str:
            settings = self._settings.providers.get(provider)
            return settings.true_model(model) if settings else model  # `Fallbacks` refuses unknown providers

        fallback = request.fallback and [
            msgspec.structs.replace(choice, model=true(choice.provider, choice.model)) for choice in request.fallback
        ]
        return msgspec.structs.replace(request, model=true(request.provider, request.model), fallback=fallback)

    async def _with_tools(self, request: Generate) -> Generate:
        """Complete tools that the request only names with the deployment's description and schema."""
        known = [t if t.parameters else await self._tool(t, f"tools[{i}]") for i, t in enumerate(request.tools)]
        return msgspec.structs.replace(request, tools=known)

    async def _tool(self, tool: Tool, where: str) -> Tool:
        """Return the tool as the deployment declares it, or else as the request defines it.

        Raises RequestInvalid for a tool that its MCP server does not list, and for a bare name that is not declared.
        """
        if tool.name in self._tools:
            return self._tools[tool.name]
        problem, known = None, set(self._tools)
        for server, prefix in self._mcp_prefixes.items():
            if tool.name.startswith(prefix):
                listed = await retry_until_available(
                    self._server, partial(self._listed.read, server), what="tools of MCP servers"
                )
                known.update(listed or ())
                if listed and tool.name in listed:
                    return listed[tool.name]
                if prefix:
                    lists = f"lists no tool {tool.name[len(prefix) :]!r}" if listed else "has listed no tools yet"
                    problem = f"the MCP server {server!r} {lists}"
        if problem:
            raise RequestInvalid(where, problem)
        if tool.description is None:
            meant = f"; did you mean {close!r}?" if (close := nearest(tool.name, known)) else ""
            problem = f"no tool {tool.name!r} is declared here, and the request has its name alone{meant}"
            raise RequestInvalid(where, problem)
        return tool

    def _accept(
        self, request: Generate, item: QueueItem, policing: PolicyPlan | None, notes: list[str]
    ) -> scripts.ScriptCall:
        run = _run_of(request, item)
        now = self._server.clock.now_ms()
        deadline_ms = now + round(request.deadline_s * 1000) if request.deadline_s else 0
        plans = [self._plan(asked) for asked in all_choices(request)]
        accepted = Accepted(
            provider=request.provider,
            model=request.model,
            on_failure=request.on_failure,
            max_tool_depth=request.max_tool_depth,
            rules=self._rules,
            tools=[t.name for t in request.tools],
            tool_timeout_s=request.tool_timeout_s,
            metadata=request.metadata,
            reading=plans[0].reading,
            continues=plans[0].continues,
            deadline_ms=deadline_ms,
            stops=tuple(request.stop) if request.mode == "chat" else (),
            record=is_recorded(run, request, self._settings.records),
            policing=policing,
            visible=request.visible,
            fallback=tuple(plans[1:]),
            notes=tuple(notes),
            participant=request.participant,
            traceparent=request.traceparent or "",
        )
        fields: list[scripts.Arg] = [REQUEST, msgspec.json.encode(request)]
        fields += [PROVIDER, request.provider, MODEL, request.model]
        if tenant := tenant_of(request.metadata):
            fields += [TENANT, tenant]
        # For `Client.resume`, which only knows the provider's name: one digit per provider that the run may call.
        fields += [CONTINUES, "".join(str(int(self._continues(asked))) for asked in all_choices(request))]
        if accepted.record and self._settings.records:
            fields += [RECORD, self._settings.records.raw_bytes]
        if deadline_ms:
            fields += [DEADLINE, deadline_ms]
        if self._spans:
            self._spans.accepted(run, request, item.entry_id)
        work = TurnWork(run, 0, 1, tenant=tenant, held=policing is not None)
        return self._make(run, EventFrame(0, CONTROL_ATTEMPT, now, [accepted]), encode(work), fields)

    def _plan(self, request: Generate) -> FallbackPlan:
        """What depends on the provider and model, for one choice of the request."""
        goes_on = request.on_failure == "continue" and self._continues(request)
        return FallbackPlan(request.provider, request.model, self._reading(request), goes_on)

    def _continues(self, request: Generate) -> bool:
        """Whether provider and model can continue the partial text of a broken turn."""
        vendor = self._settings.providers[request.provider]
        return continues(request, vendor.api, vendor.quirks.of(request.model))

    def _reading(self, request: Generate) -> TextReading | None:
        """How to read the model's text; None in chat mode, where the provider's own structure gives the blocks."""
        if request.mode == "chat":
            return None
        vendor = self._settings.providers[request.provider]
        return reading_of(request, vendor.api, vendor.quirks)

    def _make(self, run: str, frame: EventFrame, work: bytes, fields: list[scripts.Arg]) -> scripts.ScriptCall:
        keys, partition = self._keys, self._keys.partition_of(run)
        return scripts.accept(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.topic(partition, "turns"),
            keys.lease(partition, "parser"),
            keys.log(run),
            open_runs=keys.open_runs(partition),
            ended_runs=keys.ended_runs(partition),
            run=run,
            accepted_ms=frame.at_ms,
            ttl_ms=round(self._settings.retention.open_run_s * 1000),
            frame=encode(frame),
            work=work,
            fields=fields,
            epoch=keys.epoch,
        )

    def _reject(self, item: QueueItem, error: Exception) -> scripts.ScriptCall | None:
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
        now = self._server.clock.now_ms()
        tenant = item.fields.get(TENANT_FIELD.encode())
        fields: list[scripts.Arg] = [TENANT, tenant[:MAX_TENANT_CHARS]] if tenant else []
        return self._make(run, EventFrame(0, CONTROL_ATTEMPT, now, [Rejected(info)]), b"", fields)

    async def dead_letter(self, item: QueueItem, error: Exception, *, run: str | None = None) -> None:
        """Write the request to the dead-letter stream, with the reason."""
        data = item.fields.get(DATA_FIELD.encode())
        entry = DeadLetter(
            reason=_reason(error),
            stage="intake",
            stream=item.stream,
            entry=item.entry_id,
            bytes=msgspec.msgpack.encode(item.fields) if data is None else data,
            run=run or rejected_run_id(item.fields),
        )
        rejected = isinstance(error, WireError | RequestError) and not isinstance(error, PoisonRequest)
        most = self._settings.retention.dead_entries
        await dead_letter(self._server, self._keys, entry, most=most, rejected=rejected)


def _run_of(request: Generate, item: QueueItem) -> str:
    """The request's id. One without gets the entry's id, so that a second delivery is the same run."""
    return request.id or id_of_entry(item.stream, item.entry_id)


class UnreadableEntry(Exception):
    """The entry breaks every connection it is read on."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the entry cannot be read: {problem}")


def _reason(error: Exception) -> str:
    return f"{error.code if isinstance(error, TokenbusError) else type(error).__name__}: {error}"

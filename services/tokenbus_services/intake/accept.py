"""Accepts requests: validates them, assigns ids, opens runs. A repeated request is the same run.

Rejected requests are reported: one with a readable id becomes a `failed` run; any other goes to the dead-letter stream
with its bytes and the reason. A bad request never stops intake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.layout import changed, locate
from tokenbus.bus.liveness import beating
from tokenbus.bus.run_record import ASKED, REQUEST, STATUS
from tokenbus.bus.scripts.runs.accept import STALE
from tokenbus.bus.scripts.sessions import MOVED
from tokenbus.bus.server.retry import ISOLATED_TRIES, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.unreadable import type_and_id
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.core.nearest_name import nearest
from tokenbus.core.request.parse import decode_with_notes, rejected_append, rejected_run_id
from tokenbus.core.request.validate import all_choices
from tokenbus.errors import (
    InputRejected,
    PoisonRequest,
    RequestError,
    RequestInvalid,
    SettingsError,
    TokenbusError,
    WireError,
)
from tokenbus.events.child_runs import parent_call, root_of
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    PolicyPlan,
)
from tokenbus.events.requests import Append, Cancel, Generate, Tool, WaitDecision
from tokenbus.events.sessions import session_run
from tokenbus.events.waits import DecisionReply
from tokenbus_services.intake.blob_offload import IntakeMedia
from tokenbus_services.intake.input_policies import InputPolicies, Unjudged
from tokenbus_services.intake.run_creation import Cancels, RunCreation, run_of
from tokenbus_services.intake.sessions import SessionAppends
from tokenbus_services.intake.usable_fallbacks import Callee, Fallbacks, on_route
from tokenbus_services.intake.waits import Decisions, check_client_tools
from tokenbus_services.json_schema import check_output, check_tools
from tokenbus_services.runtime.mcp_tool_cache import McpToolCache
from tokenbus_services.runtime.task_failures import LoggedTasks
from tokenbus_services.settings import Settings
from tokenbus_services.telemetry import NO_TRACER, RunTracer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MEDIA_S = 30.0
"""Time limit for storing the media of the requests of one read, if the store is slow (`media_intake`)."""
MAX_BACKGROUND = 1024
ALONE_S = 1.0
"""Cluster: how long a request that may kill its workers is processed alone."""
LATE = (STALE, MOVED)
"""Replies of scripts that wrote nothing, because what they were made from has changed."""
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
        tracer: RunTracer = NO_TRACER,
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
        self._background_tasks = LoggedTasks("intake", most=lambda: MAX_BACKGROUND)
        self._cancels = cancels
        self._providers = providers
        self._fallbacks = Fallbacks(settings.fallback_routes, providers)
        listed = McpToolCache(server, settings.keys)
        self._tools = DeclaredTools(server, tools, mcp_prefixes=settings.mcp_prefixes, listed=listed)
        self._media = media
        self._creation = RunCreation(settings, server, tracer)
        self._input = InputPolicies(server, settings.keys, self._creation)
        self._judging = LoggedTasks("input", most=lambda: MAX_BACKGROUND)
        self._last_judged: dict[str, asyncio.Event] = {}
        """By run or session: the newest of its entries whose verdict is awaited is done."""
        self._sessions = SessionAppends(
            server,
            settings,
            self._creation,
            self._prepared,
            offload=media.offload,
            keep=media.keep,
            judge=self._input,
            input_plan=self._routes.input_plan,
        )
        self._decisions = Decisions(server, settings.keys)

    async def accept(self, items: Sequence[QueueItem]) -> None:
        """Accept these requests; returns when each is a run, a cancel, or reported as refused.

        In a Cluster, requests whose node does not answer continue in the background, up to `MAX_BACKGROUND`, and delay
        no others.

        Requests of lost workers are processed one at a time, in order: if one of them kills workers, it is the first to
        be redelivered, and it is given up after `MAX_DELIVERIES`.
        """
        if fresh := [item for item in items if item.deliveries == 1]:
            if self._server.topology == "cluster":
                await self._background_tasks.run(
                    partial(self._in_background, item, partial(self._take, [item])) for item in fresh
                )
            else:
                await self._take(fresh)
        for n, item in enumerate(item for item in items if item.deliveries > 1):
            if n == 0 and item.deliveries > MAX_DELIVERIES:
                take = partial(self._give_up, item)
            else:
                take = partial(self._take, [item])
            if self._server.topology == "cluster":
                await self._background_tasks.run([partial(self._in_background, item, take)], patience_s=ALONE_S)
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
        log.error("request_unreadable", entry=item.entry_id, problem=str(error) or type(error).__name__)
        problem = UnreadableEntry()
        await self._end(msgspec.structs.replace(item, fields=named), problem)
        await self.dead_letter(item, problem, run=rejected_run_id(named))

    async def close(self) -> None:
        """Stop; other workers take over unfinished work."""
        await self._judging.close()
        await self._background_tasks.close()

    async def _in_background(self, item: QueueItem, take: Callable[[], Awaitable[None]]) -> None:
        """Handle the item. If that fails, another worker gets it: kept alive here, no worker would handle it."""
        try:
            await take()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._queue.release([item])
            raise

    async def _give_up(self, item: QueueItem) -> None:
        if not await self._queue.still_has(item):
            return  # slow workers claimed it from each other; whoever has it now decides
        await self._refuse(item, PoisonRequest(item.deliveries - 1))
        await self._queue.finish([item])

    async def _take(self, items: Sequence[QueueItem]) -> None:
        epoch = self._keys.epoch
        calls: list[tuple[QueueItem, scripts.ScriptCall]] = []
        refused: list[tuple[QueueItem, Exception]] = []
        unjudged: list[tuple[QueueItem, Unjudged]] = []
        # Concurrently, because one may have large media to store. Errors of one request do not affect the others.
        taken = await beating(self._calls(items), most_s=MEDIA_S)
        for item, call in zip(items, taken, strict=True):
            if isinstance(call, Unjudged):
                unjudged.append((item, call))
            elif isinstance(call, Exception):
                if not isinstance(call, InputRejected):  # its text is not kept where no policy judged it
                    refused.append((item, call))
                await self._locate(rejected_run_id(item.fields))
                if rejection := await self._reject(item, call):
                    calls.append((item, rejection))
            elif isinstance(call, BaseException):
                raise call
            else:
                calls.append((item, call))
        sent, late = await self._send(calls)  # first, so that good requests do not wait for bad ones
        again = [item for item, _ in late]
        await self._judging.run(
            (partial(self._in_background, item, partial(self._once_judged, item, wait)) for item, wait in unjudged),
            patience_s=0,
        )
        waiting = [item for item, _ in unjudged]
        for item, error in refused:
            if item not in again:
                await self.dead_letter(item, error)
        done = [item for item in items if item not in again and item not in waiting]
        await self._queue.finish(done, again=lambda: self._repeat(sent))
        if again:
            if any(reply == STALE for _, reply in late):  # runs are placed by another number of partitions since
                await changed(self._keys, epoch)
            await self._take(again)

    async def _once_judged(self, item: QueueItem, wait: Unjudged) -> None:
        """Take the item once policies have judged it, behind the earlier ones of its session that wait for that."""
        before, done = self._last_judged.get(wait.of), asyncio.Event()
        self._last_judged[wait.of] = done
        try:
            await self._input.ended(wait.run)
            if before:
                await before.wait()
            await self._take([item])
        finally:
            done.set()
            if self._last_judged[wait.of] is done:
                del self._last_judged[wait.of]

    async def _calls(self, items: Sequence[QueueItem]) -> list[scripts.ScriptCall | BaseException]:
        return await asyncio.gather(*(self._call(item) for item in items), return_exceptions=True)

    async def _send(
        self, calls: Sequence[tuple[QueueItem, scripts.ScriptCall]]
    ) -> tuple[list[scripts.ScriptCall], list[tuple[QueueItem, object]]]:
        """Send the calls; return those that the server accepted, and the items whose calls came too late, with `STALE`
        or `MOVED`. The others are dead-lettered.
        """
        sent = [call for _, call in calls]
        late: list[tuple[QueueItem, object]] = []
        try:
            replies = await self._resend(sent)
            late = [(item, reply) for (item, _), reply in zip(calls, replies, strict=True) if reply in LATE]
        except (RedisError, OSError):
            # One of them is at fault, for example a key of its run has the wrong type. All are safe to send again.
            for item, call in calls:
                try:
                    if (reply := await self._send_individually(call)) in LATE:
                        late.append((item, reply))
                except (RedisError, OSError) as e:
                    sent.remove(call)
                    await self.dead_letter(item, e)
                    await self._end(item, e)
        return sent, late

    async def _send_individually(self, call: scripts.ScriptCall) -> object:
        return await retry_until_available(
            self._server, lambda: run_script(self._server, call), what="intake", tries=ISOLATED_TRIES
        )

    async def _end(self, item: QueueItem, error: Exception) -> None:
        """End the run of a refused request as `failed`, if the server accepts at least that."""
        if call := await self._reject(item, error):
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
        if call := await self._reject(item, error):
            await self._send([(item, call)])
        await self.dead_letter(item, error)

    async def _call(self, item: QueueItem) -> scripts.ScriptCall:
        request, unknown = decode_with_notes(item.fields, limit=self._settings.limits.request_bytes)
        if isinstance(request, Cancel):
            await self._locate(request.run)
            await self._cancels.check(request)
            return self._cancels.call(request, await self._cancels.awaited_ms())
        if isinstance(request, WaitDecision):
            await self._locate(request.run)
            try:
                return await self._decisions.call(await self._judged(request))
            except InputRejected as e:
                return self._decisions.refuse(request, DecisionReply(problem=e.problem))
        if isinstance(request, Append):
            return await self._sessions.call(request, item)
        run = run_of(request, item)
        locate_run = partial(self._locate, run)
        if plan := self._routes.input_plan(request):
            await locate_run()
            if not await self._is_known(run):
                request, judged = await self._input.judged(
                    request, plan, run, of={"run": run}, metadata=request.metadata
                )
                if judged:
                    unknown = [*unknown, f"policies judged what goes in: {', '.join(plan.names)} (run {judged})"]
        request, policy_plan, notes = await self._prepared(request, locate_run)
        session = await self._session_of(run)
        call = self._creation.accept(request, item, policy_plan, [*unknown, *notes], session=session)
        # The end of the request's entry is written after this: a replica that has it has this, too, except in a
        # Cluster, where another node has the entry.
        durable = self._server.topology == "cluster" and self._creation.level_of(request) == "replicated"
        return msgspec.structs.replace(call, durable=durable)

    async def _session_of(self, run: str) -> str | None:
        """The name of the session in whose run's tree this run is; None if it is in none, or the session is gone."""
        of = session_run(root_of(run))
        if of is None:
            return None
        key = self._keys.within(self._keys.partition_of(run)).session(of.ref)
        name: bytes | None = await retry_until_available(
            self._server, lambda: self._server.client.hget(key, "name"), what="look-up of a session"
        )
        return name.decode() if name else None

    async def _judged(self, sent: WaitDecision) -> WaitDecision:
        """The decision with its texts as the policies of what goes into its run released them."""
        if not self._settings.policies:
            return sent
        found: bytes | None = await retry_until_available(
            self._server,
            lambda: self._server.client.hget(self._keys.run(sent.run), REQUEST),
            what="look-up of a request",
        )
        if found is None or (plan := self._routes.input_plan(msgspec.json.decode(found, type=Generate))) is None:
            return sent
        name = f"{sent.run} {sent.wait} {sent.decision_id}"
        return (await self._input.judged(sent, plan, name, of={"run": sent.run}, metadata=sent.metadata))[0]

    async def _is_known(self, run: str) -> bool:
        """Whether nothing of the run's request needs to be judged: it is there already, or a policy asks for it."""
        found: list[bytes | None] = await retry_until_available(
            self._server,
            lambda: self._server.client.hmget(self._keys.run(run), [STATUS, ASKED]),
            what="look-up of a run",
        )
        return found[0] not in (None, b"awaited") or found[1] is not None

    async def _prepared(
        self, request: Generate, locate_run: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[Generate, PolicyPlan | None, list[str]]:
        """The request as its run begins with it: checked, with true names, whole tools and its media in the store; its
        policies; and notes. Raises RequestInvalid.
        """
        try:
            self._providers(request.provider)
        except SettingsError as e:
            raise RequestInvalid("provider", f"{e.where}: {e.problem}") from None
        except TokenbusError as e:
            raise RequestInvalid("provider", str(e)) from None
        if request.record and self._settings.records is None:
            raise RequestInvalid("record", "this deployment records nothing: its settings have no [records]")
        if request.durability == "replicated" and self._settings.durability is None:
            raise RequestInvalid(
                "durability", "this deployment waits for no replica: its settings have no [durability]"
            )
        for i, name in enumerate(request.webhooks):
            if name not in self._settings.webhooks:
                raise RequestInvalid(f"webhooks[{i}]", f"there is no webhook {name!r} here")
        request = await self._tools.complete(self._with_true_names(request))
        check_tools(request.tools)
        check_client_tools(request, self._settings)
        check_output(request.output_schema)
        request, notes = self._fallbacks.resolve(request)
        if locate_run:
            await locate_run()
        policy_plan = await self._policy_plan(request)
        return await self._media.offload(request), policy_plan, list(notes)

    async def _locate(self, run: str | None) -> None:
        """Note where the run is: it may exist by an earlier number of partitions, as this request's or a cancel's."""
        if run is not None:
            there = await retry_until_available(
                self._server, lambda: locate(self._server, self._keys, run), what="look-up of a run's partition"
            )
            if not there and (above := parent_call(run)):  # it begins where its parent is
                await self._locate(above[0])
                self._keys.note(run, self._keys.partition_of(above[0]))

    async def _policy_plan(self, request: Generate) -> PolicyPlan | None:
        """Return the run's policies; None, regardless of routes, if a policy published the request."""
        policy_plan = self._routes.plan_for(request)
        if policy_plan and request.id:
            key = self._keys.run(request.id)
            if await retry_until_available(
                self._server, lambda: self._server.client.hget(key, ASKED), what="look-up of a policy's question"
            ):
                return None
        return policy_plan

    def _with_true_names(self, request: Generate) -> Generate:
        """Return the request with aliases resolved to the model names that limits, routes and quirks use."""

        def true(provider: str, model: str) -> str:
            settings = self._settings.providers.get(provider)
            return settings.true_model(model) if settings else model  # `Fallbacks` refuses unknown providers

        fallback = request.fallback and [
            msgspec.structs.replace(choice, model=true(choice.provider, choice.model)) for choice in request.fallback
        ]
        return msgspec.structs.replace(request, model=true(request.provider, request.model), fallback=fallback)

    async def _reject(self, item: QueueItem, error: Exception) -> scripts.ScriptCall | None:
        run = rejected_run_id(item.fields)
        where: str | None = getattr(error, "where", None)
        if isinstance(error, TokenbusError):
            log.info("request_rejected", run=run, code=error.code, where=where)
            retryable, told = error.retryable, str(error)
            info = ErrorInfo(code=error.code, kind="invalid_request", message=told, where=where, retryable=retryable)
        else:
            log.error("request_poisoned", run=run, entry=item.entry_id, exc_info=error)
            told = str(error) if isinstance(error, UnreadableEntry) else "the request cannot be processed"
            info = ErrorInfo(code="poison", kind="internal", message=told, where=f"intake {item.entry_id}")
        if append := rejected_append(item.fields):
            reason = "rejected" if isinstance(error, InputRejected) else "refused"
            return await self._sessions.refuse(append, item, info.message, reason=reason)
        if run is None:
            return None
        return self._creation.reject(run, item, info)

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


class UnreadableEntry(Exception):
    """The entry breaks every connection it is read on."""

    def __init__(self) -> None:
        super().__init__("the entry cannot be read")


def _reason(error: Exception) -> str:
    return f"{error.code if isinstance(error, TokenbusError) else type(error).__name__}: {error}"


class DeclaredTools:
    """The tools that a request may name without repeating their schema."""

    def __init__(
        self, server: Server, tools: Sequence[Tool], *, mcp_prefixes: Mapping[str, str], listed: McpToolCache
    ) -> None:
        """``mcp_prefixes``: of the names of each MCP server's tools, by server."""
        self._server = server
        self._tools = {tool.name: tool for tool in tools}
        self._mcp_prefixes = mcp_prefixes
        self._listed = listed

    async def complete(self, request: Generate) -> Generate:
        """Complete tools that the request only names with the deployment's description and schema."""
        known = [
            t if t.parameters or t.format else await self._tool(t, f"tools[{i}]") for i, t in enumerate(request.tools)
        ]
        return msgspec.structs.replace(request, tools=known)

    async def _tool(self, tool: Tool, where: str) -> Tool:
        """Return the tool as the deployment declares it, or else as the request defines it.

        Raises RequestInvalid for a tool that its MCP server does not list, and for a bare name that is not declared.
        """
        if tool.name in self._tools:
            return msgspec.structs.replace(self._tools[tool.name], approval=tool.approval)
        problem, known = None, set(self._tools)
        for server, prefix in self._mcp_prefixes.items():
            if tool.name.startswith(prefix):
                listed = await retry_until_available(
                    self._server, partial(self._listed.read, server), what="tools of MCP servers"
                )
                known.update(listed or ())
                if listed and tool.name in listed:
                    return msgspec.structs.replace(listed[tool.name], approval=tool.approval)
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


class PolicyRoutes:
    """The deployment's policies and routes."""

    def __init__(self, settings: Settings) -> None:
        self._policies = settings.policies
        self._routes = settings.policy_routes
        self._slack_s = settings.limits.policy_slack_s

    def plan_for(self, request: Generate) -> PolicyPlan | None:
        """Return the policies of all routes that match the request, then those it names itself, without duplicates.

        A request cannot remove a routed policy. Routes of its fallbacks count too, whichever provider answers in the
        end, because released output cannot be taken back. None if there are no policies. Raises RequestInvalid for a
        name that is not configured.
        """
        choices = all_choices(request)
        routed = [name for route in self._routes if any(on_route(a, route) for a in choices) for name in route.policies]
        return self._plan("policies", routed, request.policies)

    def input_plan(self, request: Generate) -> PolicyPlan | None:
        """Return the policies that judge the request's texts before a provider gets them, as `plan_for` does."""
        choices = all_choices(request)
        routed = [
            name for route in self._routes if any(on_route(a, route) for a in choices) for name in route.input_policies
        ]
        return self._plan("input_policies", routed, request.input_policies)

    def _plan(self, field: str, routed: Sequence[str], named: Sequence[str]) -> PolicyPlan | None:
        for i, name in enumerate(named):
            if name not in self._policies:
                raise RequestInvalid(f"{field}[{i}]", f"there is no policy {name!r} here")
        names = tuple(dict.fromkeys([*routed, *named]))
        if not names:
            return None
        policies = [self._policies[name] for name in names]
        patience_s = sum(policy.timeout_s for policy in policies) + self._slack_s
        passes = all(policy.on_error == "pass" for policy in policies)
        return PolicyPlan(names, "pass" if passes else "block", round(patience_s * 1000))

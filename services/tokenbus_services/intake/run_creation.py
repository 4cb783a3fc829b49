"""The script call that creates a run (its hash, its first event, its first turn), and the one that cancels it."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from hashlib import sha256

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.keys import DATA_FIELD, TENANT_FIELD, Keys
from tokenbus.bus.layout import changed, locate
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.run_record import (
    ARCHIVE,
    CONTINUES,
    DEADLINE,
    HISTORY_BOUND,
    MODEL,
    PROVIDER,
    RECORD,
    REQUEST,
    TENANT,
    call_field,
    child_field,
    newest_seq,
)
from tokenbus.bus.scripts.fair_order import URGENT_BYTES
from tokenbus.bus.scripts.runs.accept import STALE
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.core.prefill.options import reading_of
from tokenbus.core.request.bounds import MAX_TENANT_CHARS, id_of_entry, tenant_of
from tokenbus.core.request.parse import decode_request
from tokenbus.core.request.validate import all_choices, check_heard
from tokenbus.errors import RequestInvalid
from tokenbus.events.child_runs import parent_call
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    CancelRequested,
    Control,
    EventFrame,
    FallbackPlan,
    PolicyPlan,
    Rejected,
    RunLimits,
    TextReading,
    TurnWork,
    encode,
)
from tokenbus.events.normalized import Normalized
from tokenbus.events.requests import Cancel, DurabilityLevel, Generate, HistoryBound
from tokenbus.providers import registry
from tokenbus_services.intake.usable_fallbacks import meets
from tokenbus_services.intake.waits import tool_waits
from tokenbus_services.settings import RecordSettings, RunTool, Settings
from tokenbus_services.telemetry import NO_TRACER, RunTracer, Span
from tokenbus_services.telemetry.tracer import request_options


class RunCreation:
    """Builds the calls; each creates one run, however often it is sent."""

    def __init__(self, settings: Settings, server: Server, tracer: RunTracer = NO_TRACER) -> None:
        """``server``: for its clock."""
        self._settings = settings
        self._keys: Keys = settings.keys
        self._server = server
        self._tracer = tracer
        self._told_of_every_run = [name for name, webhook in settings.webhooks.items() if webhook.every_run]
        limits, retry = settings.limits, settings.retry
        self._rules = RunLimits(
            max_attempts=retry.max_attempts,
            max_losses=retry.max_losses,
            base_delay_ms=round(retry.base_delay_s * 1000),
            max_delay_ms=round(retry.max_delay_s * 1000),
            block_chars=limits.block_characters,
            run_events=limits.run_input_events,
            turn_bytes=limits.turn_bytes,
            run_bytes=limits.run_bytes,
            child_runs=limits.child_runs,
            child_depth=limits.child_depth,
            hosted_approval_ms=round(limits.hosted_approval_timeout_s * 1000),
        )

    def accept(
        self,
        request: Generate,
        item: QueueItem,
        policy_plan: PolicyPlan | None,
        notes: list[str],
        *,
        session: str | None = None,
    ) -> scripts.ScriptCall:
        """The call that accepts the request. ``notes``: for the run's first event. ``session``: which the run is of, if
        it is a child run in one.
        """
        run = run_of(request, item)
        now = self._server.clock.now_ms()
        accepted, fields = self._decided(request, run, policy_plan, notes)
        accepted = msgspec.structs.replace(accepted, session=session)
        if request.deadline_s:
            until_ms = now + accepted.deadline_after_ms
            accepted = msgspec.structs.replace(accepted, deadline_ms=until_ms, deadline_after_ms=0)
            fields += [DEADLINE, accepted.deadline_ms]
        record_accepted(self._tracer, run, request, self._server.clock.ms_of(id_key(item.entry_id)[0]), now)
        tenant = tenant_of(request.metadata)
        work = TurnWork(run, 0, 1, tenant=tenant, held=policy_plan is not None)
        return self._call(run, EventFrame(0, CONTROL_ATTEMPT, now, [accepted]), encode(work), fields, tenant)

    def judging(
        self, run: str, policy_plan: PolicyPlan, answer: Sequence[Normalized], metadata: dict[str, object], *, mark: str
    ) -> scripts.ScriptCall:
        """The call that creates a run which calls no provider: ``answer`` is its output, and its policies judge it.

        ``mark``: a field of its hash.
        """
        accepted = Accepted(
            provider="",
            model="",
            on_failure="fail",
            max_tool_depth=0,
            rules=self._rules,
            tools=[],
            metadata=metadata,
            policy_plan=policy_plan,
            visible=False,
        )
        tenant = tenant_of(metadata)
        fields: list[scripts.Arg] = [mark, 1, *([TENANT, tenant] if tenant else [])]
        frame = EventFrame(0, CONTROL_ATTEMPT, self._server.clock.now_ms(), [accepted, *answer])
        return self._call(run, frame, b"", fields, tenant)

    def session_work(
        self,
        request: Generate,
        append: str,
        policy_plan: PolicyPlan | None,
        notes: list[str],
        *,
        session: str,
        version: int,
        history: HistoryBound | None,
    ) -> bytes:
        """What a message of a session starts, now or later, as scripts/pieces/session_run.lua reads it: its messages,
        the run's first event, its deadline in ms after that, whether policies judge it, its tenant, the number of the
        configuration, and fields of the run's hash.
        """
        accepted, fields = self._decided(request, append, policy_plan, notes)
        accepted = msgspec.structs.replace(accepted, session=session)
        if history:
            fields += [HISTORY_BOUND, msgspec.json.encode(history)]
        texts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
        tenant = tenant_of(request.metadata).encode()
        numbers = [
            msgspec.msgpack.encode(n) for n in (accepted.deadline_after_ms, int(policy_plan is not None), version)
        ]
        messages, begun = msgspec.json.encode(request.messages)[1:-1], msgspec.msgpack.encode(accepted)
        return _lua_array(
            [
                *map(_lua_text, (messages, begun)),
                *numbers[:2],
                _lua_text(tenant),
                numbers[2],
                _lua_array(map(_lua_text, texts)),
            ]
        )

    def _decided(
        self, request: Generate, name: str, policy_plan: PolicyPlan | None, notes: list[str]
    ) -> tuple[Accepted, list[scripts.Arg]]:
        """What is decided about the run, and fields of its hash. ``name``: by which it is chosen to be recorded."""
        plans = [self._plan(choice) for choice in all_choices(request)]
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
            stops=tuple(request.stop) if request.mode == "chat" else (),
            record=is_recorded(name, request, self._settings.records),
            archive=self._settings.archive is not None,
            policy_plan=policy_plan,
            visible=request.visible,
            fallback=tuple(plans[1:]),
            notes=tuple(notes),
            participant=request.participant,
            traceparent=request.traceparent or "",
            commentary=request.commentary == "visible",
            deadline_after_ms=round(request.deadline_s * 1000) if request.deadline_s else 0,
            webhooks=tuple(dict.fromkeys([*request.webhooks, *self._told_of_every_run])),
            waits=tool_waits(request, self._settings),
            begins_runs=self._begins_runs(request),
            options=request_options(request),
            durable=self.level_of(request) == "replicated",
        )
        fields: list[scripts.Arg] = [REQUEST, msgspec.json.encode(request)]
        fields += [PROVIDER, request.provider, MODEL, request.model]
        if tenant := tenant_of(request.metadata):
            fields += [TENANT, tenant]
        # For `Client.resume`, which only knows the provider's name: one digit per provider that the run may call.
        fields += [CONTINUES, "".join(str(int(plan.continues)) for plan in plans)]
        if accepted.record and self._settings.records:
            fields += [RECORD, self._settings.records.raw_bytes]
        if accepted.archive:
            fields += [ARCHIVE, 1]
        return accepted, fields

    def level_of(self, request: Generate) -> DurabilityLevel:
        """What the run's acceptance, its calls and its end wait for."""
        kept = self._settings.durability
        own = request.durability or self._settings.providers[request.provider].durability
        return own or (kept.default if kept else "server")

    def _begins_runs(self, request: Generate) -> dict[str, int]:
        declared = [(tool.name, self._settings.tools.get(tool.name)) for tool in request.tools]
        return {name: round(tool.timeout_s * 1000) for name, tool in declared if isinstance(tool, RunTool)}

    def _plan(self, request: Generate) -> FallbackPlan:
        """What depends on the provider and model, for one choice of the request."""
        vendor = self._settings.providers[request.provider]
        continues = registry.continues(request, vendor.api, vendor.quirks.of(request.model))
        return FallbackPlan(request.provider, request.model, self._reading(request), continues)

    def _reading(self, request: Generate) -> TextReading | None:
        """How to read the model's text; None in chat mode, where the provider's own structure gives the blocks."""
        if request.mode == "chat":
            return None
        vendor = self._settings.providers[request.provider]
        return reading_of(request, vendor.api, vendor.quirks)

    def _call(
        self, run: str, frame: EventFrame, work: bytes, fields: list[scripts.Arg], tenant: str
    ) -> scripts.ScriptCall:
        keys, partition = self._keys, self._keys.partition_of(run)
        above = parent_call(run)
        return scripts.accept(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.topic(partition, "turns"),
            keys.lease(partition, "parser"),
            keys.log(run),
            keys.within(partition).run(above[0]) if above else keys.run(run),
            open_runs=keys.open_runs(partition),
            ended_runs=keys.ended_runs(partition),
            of_tenant=(keys.open_runs(partition, tenant), keys.ended_runs(partition, tenant)) if tenant else (),
            run=run,
            accepted_ms=frame.at_ms,
            ttl_ms=round(self._settings.retention.open_run_s * 1000),
            frame=encode(frame),
            work=work,
            fields=fields,
            epoch=keys.epoch,
            parent_call=call_field(above[1]) if above else "",
            parent_child=child_field(above[1]) if above else "",
        )

    def reject(self, run: str, item: QueueItem, error: ErrorInfo) -> scripts.ScriptCall:
        """The call that creates the run of a refused request, which ends at once as `failed`."""
        now = self._server.clock.now_ms()
        tenant = item.fields.get(TENANT_FIELD.encode(), b"").decode(errors="replace").strip()[:MAX_TENANT_CHARS]
        fields: list[scripts.Arg] = [TENANT, tenant] if tenant else []
        rejected = Rejected(error, tenant=tenant, webhooks=tuple(self._told_of_every_run))
        frame = EventFrame(0, CONTROL_ATTEMPT, now, [rejected])
        return self._call(run, frame, b"", fields, tenant)


def _lua_text(data: bytes) -> bytes:
    """Bytes as MessagePack text, for the server's decoder knows no binary data."""
    return b"\xdb" + len(data).to_bytes(4) + data


def _lua_array(parts: Iterable[bytes]) -> bytes:
    parts = list(parts)
    return b"\xdd" + len(parts).to_bytes(4) + b"".join(parts)


def run_of(request: Generate, item: QueueItem) -> str:
    """The request's id. One without gets the entry's id, so that a second delivery is the same run."""
    return request.id or id_of_entry(item.stream, item.entry_id)


def record_accepted(tracer: RunTracer, run: str, request: Generate, begin_ms: int, end_ms: int) -> None:
    """Record the span of a request on its way in: from its entry on the inbound stream to its run."""
    if trace := tracer.trace(run, request.traceparent):
        tracer.record(
            trace,
            Span(
                name="intake",
                span_id=trace.span("intake"),
                parent_id=trace.root,
                begin_ms=begin_ms,
                end_ms=end_ms,
                attributes={
                    "tokenbus.run.id": run,
                    "tokenbus.provider": request.provider,
                    "tokenbus.model": request.model,
                },
            ),
        )


# Decides which runs are recorded: those that ask for it, and a sample of the others. Pure and deterministic per
# run.


def is_recorded(run: str, request: Generate, settings: RecordSettings | None) -> bool:
    """Whether this run is recorded. The request's own setting takes precedence."""
    if settings is None or request.record is not None:
        return bool(settings and request.record)
    return meets(request, settings) and _place(run) < settings.sample


def _place(run: str) -> float:
    """Map a run id uniformly to [0, 1), independently of its partition."""
    return int.from_bytes(sha256(run.encode()).digest()[:6]) / 2**48


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAYBE_CANCEL = re.compile(rb'"type\\?"\s*:\s*\\?"cancel|\xa4type\xa6cancel')
"""The same pattern as on the server (bus/scripts/pieces/look.lua)."""
AWAITED_MS = 60_000
"""How long a cancel waits for an unknown run: another fetcher may be accepting its request."""
AWAITED_MS_A_REQUEST = 100
"""Additional wait per request on the inbound stream, because the cancel may have overtaken all of them."""
AT_ONCE = 200
MOST_LEFT = 4 * AT_ONCE
CLOSE_S = 5.0


class Cancels:
    """Applies cancels concurrently with intake. Call `close` at the end."""

    def __init__(self, server: Server, keys: Keys, queue: WorkQueue, liveness: Liveness | None = None) -> None:
        self._server = server
        self._keys = keys
        self._queue = queue
        self._liveness = liveness or Liveness()
        self._read: defaultdict[int, list[tuple[QueueItem, Cancel]]] = defaultdict(list)
        """Cancels not sent yet. In a Cluster by partition: a node that is unavailable delays only its own."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._left_to_intake: deque[str] = deque(maxlen=MOST_LEFT)
        """Entry ids of cancels that were passed over here, so that intake reports what is wrong with each."""

    def take(self, item: QueueItem) -> bool:
        """Start applying and finishing the item if it is a valid cancel; return False if it is not."""
        if item.entry_id in self._left_to_intake:
            return False
        data = item.fields.get(DATA_FIELD.encode(), b"")
        if len(data) > URGENT_BYTES or not MAYBE_CANCEL.search(data):
            return False
        try:
            request = decode_request(item.fields)
        except Exception:
            return False  # intake reports what is wrong when it gets to it
        if not isinstance(request, Cancel):
            return False
        lane = self._keys.partition_of(request.run) if self._server.topology == "cluster" else 0
        self._read[lane].append((item, request))
        if lane not in self._tasks or self._tasks[lane].done():
            self._tasks[lane] = self._liveness.start_passing(self._apply_all(self._read[lane]), name="cancels")
        return True

    async def close(self) -> None:
        """Wait for cancels in progress, at most `CLOSE_S`; other workers claim the rest."""
        tasks = self._tasks.values()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def call(self, request: Cancel, awaited_ms: int = AWAITED_MS) -> scripts.ScriptCall:
        """Build the script call that applies a cancel."""
        keys, run = self._keys, request.run
        partition = keys.partition_of(run)
        now = self._server.clock.now_ms()
        cancel = CancelRequested(request.reason, request.heard_through, request.heard_characters)
        return scripts.cancel(
            keys.run(run),
            keys.topic(partition, "events"),
            keys.topic(partition, "raw"),
            keys.topic(partition, "control"),
            parser_lease=keys.lease(partition, "parser"),
            normalizer_lease=keys.lease(partition, "normalizer"),
            run=run,
            awaited_ms=awaited_ms,
            frame=encode(EventFrame(0, CONTROL_ATTEMPT, now, [cancel])),
            control_frame=encode(Control(run)),
            epoch=keys.epoch,
        )

    async def check(self, request: Cancel) -> None:
        """Raise RequestInvalid if the run has no event as new as the one that its listener heard."""
        if request.heard_through is not None and request.heard_through >= 0:
            run_key = self._keys.run(request.run)
            newest = await retry_until_available(
                self._server, lambda: newest_seq(self._server.client, run_key), what="newest event of a run"
            )
            check_heard(request, newest)

    async def awaited_ms(self) -> int:
        """How long a cancel waits for its request, given the current length of the inbound stream."""
        requests = self._keys.requests
        waiting = await retry_until_available(
            self._server, lambda: self._server.client.xlen(requests), what="length of the inbound stream"
        )
        return AWAITED_MS + waiting * AWAITED_MS_A_REQUEST

    async def _apply_all(self, read: list[tuple[QueueItem, Cancel]]) -> None:
        while batch := read[:AT_ONCE]:
            del read[:AT_ONCE]
            items = [item for item, _ in batch]
            requests = [request for _, request in batch]
            try:
                try:
                    await self._apply(requests)
                except (RedisError, OSError, RequestInvalid) as e:
                    # One of them is at fault, for example a key of its run has the wrong type. Intake reports which
                    # one.
                    log.warning("cancels_skipped", cancels=len(items), error=str(e))
                    self._left_to_intake.extend(item.entry_id for item in items)
                    await self._queue.discard(items)
                else:
                    await self._queue.finish(items, again=lambda requests=requests: self._apply(requests))
            except Exception:  # any error: another fetcher gets them next, one by one (`Acceptance`), and a bounded
                # number of times
                log.exception("cancels_not_finished", cancels=len(items))
                self._liveness.failed_work("cancels")
                self._queue.release(items)

    async def _apply(self, requests: Sequence[Cancel]) -> None:
        epoch = self._keys.epoch
        await retry_until_available(
            self._server, lambda: locate(self._server, self._keys, *(r.run for r in requests)), what="runs to cancel"
        )
        for request in requests:
            await self.check(request)
        calls = [self.call(request) for request in requests]
        replies = await retry_until_available(self._server, lambda: run_scripts(self._server, calls), what="cancels")
        if stale := [request for request, reply in zip(requests, replies, strict=True) if reply == STALE]:
            await changed(self._keys, epoch)
            await self._apply(stale)
        unknown = [request for request, reply in zip(requests, replies, strict=True) if reply == b"awaited"]
        if unknown:
            awaited_ms = await self.awaited_ms()
            calls = [self.call(request, awaited_ms) for request in unknown]
            await retry_until_available(
                self._server, lambda: run_scripts(self._server, calls), what="cancels that wait for their run"
            )

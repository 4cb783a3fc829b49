"""The parser's clock: ends runs past their deadline, and answers for tools and policies that will not answer.

The parser itself knows only the time of its events. So the clock writes its findings as events, by scripts that check
that the run is still open: a second clock, of a worker that has lost the partition, does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import structlog
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import process_clock, scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import read_lag
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.run_record import ENDED, STATUS, UNENDED, status_of
from tokenbus.bus.scripts.runs.timeouts import RunIs, append_timeout, expire, read_policy_stage
from tokenbus.bus.server.error_replies import is_final
from tokenbus.bus.server.retry import Defects
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.stage.stage import Stage
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.state import OpenWait, PendingCall, RunState
from tokenbus.core.run.tool_calls import work_of
from tokenbus.core.run.waits import NO_RESULT as NO_CLIENT_RESULT
from tokenbus.core.run.waits import NOBODY, waits_only
from tokenbus.events.child_runs import parent_call
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    HAS_ENDED,
    BusEvent,
    CancelRequested,
    Control,
    DeadlinePassed,
    EventFrame,
    ToolReturned,
    WaitDecided,
    encode,
)
from tokenbus_services.parser.away import AwayRuns
from tokenbus_services.parser.effect_writer import PARENT_ENDED, handed_out
from tokenbus_services.parser.index_keeper import IndexKeeper
from tokenbus_services.parser.logic import ParserLogic
from tokenbus_services.parser.lost_work import LostWork
from tokenbus_services.settings import DEFAULT_TOOL_TIMEOUT_S, Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

NO_RESULT = "the tool's result never came"
LOST_CALL = "the call was lost before a result came; it may have run"
LOOKS_PER_SILENCE = 2
"""How often to look for lost runs during the time after which a run counts as silent."""
INDEX_LOOKS = 6
"""The index is looked at with every sixth of these looks."""
PAGE = 1000
ABANDONED = (b"cancelling", b"expiring")
"""Statuses under which no worker may write; the event that ends the run was written with them."""


class TimeoutClock:
    """Checks the open runs of the partitions that this worker owns. Call `open`, then `close`."""

    def __init__(
        self,
        server: Server,
        stage: Stage,
        settings: Settings,
        logics: Mapping[int, ParserLogic],
        liveness: Liveness | None = None,
    ) -> None:
        """``logics``: by partition, the most recent logic."""
        self._server = server
        self._stage = stage
        self._keys: Keys = settings.keys
        self._logics = logics
        self._liveness = liveness or Liveness()
        self._timeouts = Timeouts.of(settings)
        self._tick_s = settings.stages.tick_s
        self._look_s = settings.limits.silent_run_s / LOOKS_PER_SILENCE
        self._next_look = 0.0
        self._looks = 0
        self._lost = LostWork(server, self._keys, liveness=self._liveness)
        self._stood_s = process_clock.stood_s()
        self._stood_until_ms = 0
        """When this process last continued after it stood."""
        kept = settings.retention
        self._index = IndexKeeper(
            server, self._keys, keep_ms=round(kept.finished_run_s * 1000), open_ms=round(kept.open_run_s * 1000)
        )
        self._away = AwayRuns(server, self._keys, stage, logics, open_ms=round(kept.open_run_s * 1000))
        self._policy_stage_observers: dict[int, PolicyStageObserver] = {}
        """By partition."""
        self._unwritable: dict[int, dict[str, tuple[RunIs, int]]] = {}
        """By partition: the runs whose hash refused all writes at the last look, and how many events they had then."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start checking."""
        self._task = self._liveness.start(self._run(), name="clock")

    async def close(self) -> None:
        await stop_task(self._task)

    async def _run(self) -> None:
        defects = Defects()
        while True:
            await rest(self._tick_s)
            try:
                await self._tick()
                defects.none()
            except Exception as e:  # any error: the next look may succeed
                log.warning("timeout_check_failed", problem=f"{type(e).__name__}: {e}")
                defects.count(e)

    async def _tick(self) -> None:
        calls: list[scripts.ScriptCall] = []
        look = time.monotonic() >= self._next_look
        if look:
            self._next_look = time.monotonic() + self._look_s
            if self._looks % INDEX_LOOKS == 0:
                await self._index.look({p: self._logics[p].states() for p in self._stage.owned})
            self._looks += 1
        if (stood_s := process_clock.stood_s()) != self._stood_s:
            self._stood_s, self._stood_until_ms = stood_s, self._server.clock.now_ms()
        stood_ms = self._stood_until_ms
        stages = await self._read_policy_stages()
        await self._away.look()
        for partition in self._stage.owned:
            now_ms, stage = self._server.clock.now_ms(), stages.get(partition)
            silent: list[RunState] = []
            for s in self._logics[partition].states():
                if s.sealed:  # it is over, and `DurableEnds` publishes its end
                    continue
                if self._timeouts.deadline_passed(s, now_ms):
                    calls.append(self._deadline(partition, s))
                    continue
                calls += [
                    self._wait_timeout(partition, s, p, p.wait)
                    for p in s.calls
                    if p.wait and p.wait.deadline_ms <= now_ms
                ]
                calls += [
                    self._tool_timeout(partition, s, p)
                    for p in self._timeouts.overdue_calls(s, now_ms, stood_until_ms=stood_ms)
                ]
                if stage and self._timeouts.policies_overdue(s, now_ms, stage, stood_until_ms=stood_ms):
                    calls.append(self._policy_timeout(partition, s))
                if look and self._timeouts.is_silent(s, now_ms, stood_until_ms=stood_ms):
                    silent.append(s)
            if look:
                closed = await self._closed_elsewhere(partition, silent)
                calls += [self._abandonment(partition, *found) for found in closed]
                lost = await self._lost.look(partition, silent, self._logics[partition].states())
                calls += [self._attempt_timeout(partition, s) for s in lost.runs]
                calls += [self._tool_timeout(partition, s, p, LOST_CALL) for s, p in lost.calls if not p.child]
                for s, p in lost.calls:
                    if p.child:  # whatever was lost, the worker finds the child as it is
                        key = self._keys.within(partition).run(p.child)
                        if status_of(await self._server.client.hget(key, STATUS)) == "open":
                            continue  # it is put away
                        log.warning("child_asked_for_again", run=s.run, child=p.child)
                        await self._server.client.xadd(
                            self._keys.topic(partition, "tools"), {s.run: handed_out(s, work_of(s, p))}
                        )
                calls += await self._orphans(partition)
        if calls:
            await self._send(calls)

    async def _send(self, calls: list[scripts.ScriptCall]) -> None:
        """Send the calls; if one fails for good, send the others individually."""
        try:
            await run_scripts(self._server, calls)
        except (RedisError, OSError) as e:
            if not is_final(e):
                raise
            for call in calls:
                try:
                    await run_script(self._server, call)
                except ResponseError as e:
                    log.warning("timeout_not_applied", key=call.keys[0], problem=str(e))

    async def _read_policy_stages(self) -> dict[int, PolicyStageStatus]:
        """Read the state of the policy stage in partitions that have runs under policies."""
        owned = self._stage.owned
        self._policy_stage_observers = {p: seen for p, seen in self._policy_stage_observers.items() if p in owned}
        partitions = [p for p in owned if any(s.gate for s in self._logics[p].states())]
        calls = [read_policy_stage(self._keys.lease(p, "policy")) for p in partitions]
        replies = await run_scripts(self._server, calls) if calls else []
        now_ms, found = self._server.clock.now_ms(), dict[int, PolicyStageStatus]()
        for partition, (alive, lag, read) in zip(partitions, replies, strict=True):
            seen = self._policy_stage_observers.setdefault(partition, PolicyStageObserver())
            at = read.decode()
            read_ms = self._server.clock.ms_of(id_key(at)[0])
            found[partition] = seen.observe(alive=bool(alive), lag_bytes=lag, read=at, read_ms=read_ms, now_ms=now_ms)
        return found

    async def _closed_elsewhere(self, partition: int, silent: Sequence[RunState]) -> list[tuple[RunState, RunIs]]:
        """Return the runs that are open in the parser while their hash refuses all writes, so they can never end.

        Either the hash is gone (expired or deleted), or it says that the run is about to end and the event for that was
        lost, or the run has ended and the parser's state is older. A run is returned if two looks in a row find it so,
        without an event between them and with no unread input.
        """
        keys, before = self._keys.within(partition), self._unwritable.pop(partition, {})
        now: dict[str, tuple[RunIs, int]] = {}
        states = {s.run: s for s in silent}
        runs = list(states)
        for at in range(0, len(runs), PAGE):
            pipe = self._server.client.pipeline(transaction=False)
            for run in runs[at : at + PAGE]:
                pipe.hget(keys.run(run), STATUS)
            for run, found in zip(runs[at : at + PAGE], await pipe.execute(raise_on_error=False), strict=True):
                if found is None or found in ABANDONED:
                    now[run] = "abandoned", states[run].events_applied
                elif isinstance(found, bytes) and status_of(found) in ENDED:
                    now[run] = "ended", states[run].events_applied
        self._unwritable[partition] = now
        same: list[tuple[RunState, RunIs]] = [
            (states[run], seen[0]) for run, seen in now.items() if before.get(run) == seen
        ]
        if same and await read_lag(self._server.client, self._keys.lease(partition, "parser")):
            return []
        return same

    async def _orphans(self, partition: int) -> list[scripts.ScriptCall]:
        """Cancel child runs whose parent ended without doing so: its state was unreadable, or a fail-over lost that.

        A parent is accepted before its children, in the same log, so one that is not open here has ended or is put
        away.
        """
        states = {s.run for s in self._logics[partition].states()}
        doubtful = {run: above[0] for run in states if (above := parent_call(run)) and above[0] not in states}
        if not doubtful:
            return []
        keys, calls = self._keys.within(partition), list[scripts.ScriptCall]()
        pipe = self._server.client.pipeline(transaction=False)
        for parent in doubtful.values():
            pipe.hget(keys.run(parent), STATUS)
        for run, found in zip(doubtful, await pipe.execute(raise_on_error=False), strict=True):
            if not isinstance(found, Exception) and status_of(found) not in UNENDED:
                call = scripts.cancel(
                    keys.run(run),
                    keys.topic(partition, "events"),
                    keys.topic(partition, "raw"),
                    keys.topic(partition, "control"),
                    parser_lease=keys.lease(partition, "parser"),
                    normalizer_lease=keys.lease(partition, "normalizer"),
                    run=run,
                    awaited_ms=1,
                    frame=self._frame(CancelRequested(PARENT_ENDED)),
                    control_frame=encode(Control(run)),
                    epoch=self._keys.epoch,
                )
                calls.append(call)
        return calls

    # --- expired ----------------------------------------------------------------------------------------

    def _deadline(self, partition: int, s: RunState) -> scripts.ScriptCall:
        keys = self._keys.within(partition)
        log.info("run_expired", run=s.run, turn=s.turn, attempt=s.attempt)
        return expire(
            keys.run(s.run),
            keys.topic(partition, "events"),
            keys.topic(partition, "raw"),
            keys.topic(partition, "control"),
            parser_lease=keys.lease(partition, "parser"),
            normalizer_lease=keys.lease(partition, "normalizer"),
            run=s.run,
            frame=self._frame(DeadlinePassed("deadline")),
            control_frame=encode(Control(s.run)),
        )

    def _tool_timeout(
        self, partition: int, s: RunState, pending: PendingCall, problem: str = NO_RESULT
    ) -> scripts.ScriptCall:
        keys, block = self._keys.within(partition), pending.call.block
        log.info("tool_call_timed_out", run=s.run, turn=s.turn, block=block, tool=pending.call.name)
        return scripts.tool_result(
            keys.run(s.run),
            keys.topic(partition, "events"),
            keys.lease(partition, "parser"),
            run=s.run,
            block=block,
            attempt=s.attempt,
            answers=len(pending.answers),
            frame=self._frame(ToolReturned(block, problem, is_error=True)),
        )

    def _wait_timeout(self, partition: int, s: RunState, pending: PendingCall, wait: OpenWait) -> scripts.ScriptCall:
        log.info("wait_timed_out", run=s.run, turn=s.turn, tool=pending.runs.name, what=wait.what)
        decision = wait.on_deadline
        why = (NOBODY if wait.what == "approval" else NO_CLIENT_RESULT) if decision == "deny" else ""
        decided = WaitDecided(wait.name, wait.what, decision, f"{wait.name}.deadline", door="deadline", reason=why)
        keys, now_ms = self._keys.within(partition), self._server.clock.now_ms()
        tenant, durable = tenant_of(s.accepted.metadata), s.accepted.durable
        return scripts.decision(
            keys, s.run, tenant, decided, at_ms=now_ms, durable=durable, held=wait.held, replies=False
        )

    def _policy_timeout(self, partition: int, s: RunState) -> scripts.ScriptCall:
        assert s.gate
        log.warning("run_policies_timed_out", run=s.run, turn=s.turn, attempt=s.attempt)
        return self._append(partition, s, DeadlinePassed("policy", s.gate.signs_of_life))

    def _attempt_timeout(self, partition: int, s: RunState) -> scripts.ScriptCall:
        log.warning("run_lost", run=s.run, turn=s.turn, attempt=s.attempt)
        return self._append(partition, s, DeadlinePassed("silent", s.events_applied))

    def _abandonment(self, partition: int, s: RunState, found: RunIs) -> scripts.ScriptCall:
        if found == "ended":
            log.warning("run_ended_before", run=s.run, turn=s.turn, attempt=s.attempt, phase=s.phase)
            return self._append(partition, s, DeadlinePassed("silent", HAS_ENDED), only_if=found)
        log.warning("run_without_keys", run=s.run, turn=s.turn, attempt=s.attempt, phase=s.phase)
        return self._append(partition, s, DeadlinePassed("silent", s.events_applied), only_if=found)

    def _frame(self, event: BusEvent) -> bytes:
        return encode(EventFrame(0, CONTROL_ATTEMPT, self._server.clock.now_ms(), [event]))

    def _append(
        self, partition: int, s: RunState, event: DeadlinePassed, *, only_if: RunIs = "open"
    ) -> scripts.ScriptCall:
        keys = self._keys.within(partition)
        return append_timeout(
            keys.run(s.run),
            keys.topic(partition, "events"),
            keys.lease(partition, "parser"),
            run=s.run,
            frame=self._frame(event),
            only_if=only_if,
        )


class PolicyStageStatus(msgspec.Struct, frozen=True):
    """The state of the policy stage in one partition."""

    alive_ms: int
    """Unix time when a worker was last seen to own the partition; 0: never."""
    alive: bool
    """Whether a worker owns it now."""
    lag_bytes: int
    """Bytes of drafts that it has not read."""
    read_ms: int
    """When the last draft that it has read was written."""


MAX_LOSSES = 5
"""How often a stage may be lost without reading anything before it counts as unavailable."""


class PolicyStageObserver:
    """Observes the policy stage in one partition, look by look."""

    def __init__(self) -> None:
        self._alive_ms: int | None = None
        self._read = ""
        self._was_alive = False
        self._losses = 0

    def observe(self, *, alive: bool, lag_bytes: int, read: str, read_ms: int, now_ms: int) -> PolicyStageStatus:
        """Record an observation: whether a worker owns it, and the last entry read, with the time of that draft.

        A stage that is lost repeatedly without reading anything counts as unavailable: its workers do not restart the
        timeout.
        """
        if read != self._read or lag_bytes == 0:
            self._read, self._losses = read, 0
        if self._was_alive and not alive:
            self._losses += 1
        self._was_alive = alive
        # If it is unavailable at the first look, it existed before; when it was lost is unknown, so assume now.
        if (alive and self._losses < MAX_LOSSES) or (self._alive_ms is None and read != "0-0"):
            self._alive_ms = now_ms
        return PolicyStageStatus(self._alive_ms or 0, alive, lag_bytes, read_ms)


class Timeouts(msgspec.Struct, frozen=True):
    """The parser's timeouts."""

    tools_s: Mapping[str, float | None]
    """By tool: its own timeout."""
    prefixes_s: Mapping[str, float | None]
    """By name prefix of an MCP server's tools."""
    slack_s: float
    silent_s: float
    lag_bytes: int
    """Above this lag, attempts of runs under policies are held back."""

    @classmethod
    def of(cls, settings: Settings) -> Timeouts:
        """Read the timeouts from the deployment's settings."""
        prefixes = settings.mcp_prefixes
        return cls(
            tools_s={name: tool.timeout_s for name, tool in settings.tools.items()},
            prefixes_s={prefixes[name]: server.timeout_s for name, server in settings.mcp.items()},
            slack_s=settings.limits.tool_slack_s,
            silent_s=settings.limits.silent_run_s,
            lag_bytes=settings.limits.lag_bytes,
        )

    def deadline_passed(self, s: RunState, now_ms: int) -> bool:
        """While the run only waits for somebody, its time stands."""
        return 0 < s.accepted.deadline_ms <= now_ms and not s.waits_since_ms

    def overdue_calls(self, s: RunState, now_ms: int, *, stood_until_ms: int = 0) -> Iterator[PendingCall]:
        """Yield calls whose tool would have returned by now if it had run.

        ``stood_until_ms``, here and below: when the parser last continued after it stood. It had read nothing until
        then, so what it waits for has all its time from there on.
        """
        if s.phase == "tools":
            for pending in s.calls:
                allowed_s = self._tool_s(pending.runs.name, s.accepted.tool_timeout_s) + self.slack_s
                if (
                    pending.is_at_worker
                    and not pending.child  # which has a deadline
                    and now_ms - max(s.seen_ms, stood_until_ms) > allowed_s * 1000
                ):
                    yield pending

    def policies_overdue(self, s: RunState, now_ms: int, stage: PolicyStageStatus, *, stood_until_ms: int = 0) -> bool:
        """Whether the run's policies would have decided by now if any worker were running them.

        A slow stage is not an absent one: drafts that it has not read are waiting their turn. If the stage is
        unavailable, a run whose attempt is held back by other runs' drafts waits no longer than a run with drafts of
        its own.
        """
        gate, policy_plan = s.gate, s.accepted.policy_plan
        if gate is None or policy_plan is None or gate.bypassed:
            return False
        if gate.idle and (stage.alive or s.phase != "streaming" or stage.lag_bytes <= self.lag_bytes // 2):
            return False
        since_ms = max(gate.since_ms, s.seen_ms, s.accepted_ms) if gate.idle else gate.since_ms
        since_ms = max(since_ms, stood_until_ms)
        if not stage.alive:
            now_ms -= max(0, stage.alive_ms - since_ms)
        elif stage.lag_bytes > 0:
            now_ms = min(now_ms, stage.read_ms)
        return now_ms - since_ms > policy_plan.patience_ms

    def is_silent(self, s: RunState, now_ms: int, *, stood_until_ms: int = 0) -> bool:
        """Whether the run had no event for so long that its work may be lost. While it waits for somebody alone, it has
        no work that could be.
        """
        until_ms = max(p.wait.deadline_ms for p in s.calls if p.wait) if waits_only(s) else 0
        return now_ms - max(s.seen_ms, s.accepted_ms, stood_until_ms, until_ms) > self.silent_s * 1000

    def _tool_s(self, name: str, requested_s: float | None) -> float:
        own_s = self.tools_s.get(name)
        for prefix, timeout_s in self.prefixes_s.items():
            if name not in self.tools_s and name.startswith(prefix):
                own_s = timeout_s
        return min((s for s in (requested_s, own_s) if s is not None), default=DEFAULT_TOOL_TIMEOUT_S)

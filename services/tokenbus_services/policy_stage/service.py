"""Everything that the runs of one policy worker share, and their limits."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenbus.bus.liveness import Liveness, rest, wait_briefly
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.stage import Stage
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import RecordedDecision, drafts_decoder
from tokenbus.policy.loading import PolicySpec
from tokenbus.policy.policy_runner import OnError
from tokenbus_services.executor.processes import End
from tokenbus_services.executor.protocol import Setup
from tokenbus_services.policy_stage.executors import InWorker, PolicyExecutors, PolicyPool
from tokenbus_services.policy_stage.messages import PolicyWork
from tokenbus_services.policy_stage.run_task import PolicyRunTask, RunRecord, ServerRunRecord
from tokenbus_services.redaction.known_secrets import secrets_of
from tokenbus_services.settings import Settings
from tokenbus_services.telemetry import NO_TRACER, RunTracer, Span

REPORTS_IN_SLACK = 3
"""How many times a waiting run is reported as waiting during the parser's shortest policy timeout."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class PolicyService:
    """Creates the logics of partitions and the tasks of their runs. Call `start`, `open`, then `close`."""

    def __init__(self, settings: Settings, registry: CollectorRegistry, tracer: RunTracer = NO_TRACER) -> None:
        """Does no IO. Imports policies only if they run inside the worker; it may then raise SettingsError."""
        self._keys = settings.keys
        self._tracer = tracer
        limits = settings.limits
        self._limits = limits
        self._tick_s = settings.stages.tick_s
        self._on_error: Mapping[str, OnError] = {name: p.on_error for name, p in settings.policies.items()}
        self._report_waiting_s = limits.policy_slack_s / REPORTS_IN_SLACK
        self._decisions = Counter(
            "tokenbus_policy_decisions",
            "Decisions of policies, by policy and action.",
            ["policy", "action"],
            registry=registry,
        )
        self._ends = Counter(
            "tokenbus_policy_executor_ends", "Executors that a policy ended, by how.", ["end"], registry=registry
        )
        self._executors = self._make_executors(settings)
        self._server: Server | None = None
        self._stage: Stage | None = None
        self._opened = asyncio.Event()
        self._logics: dict[int, PolicyLogic] = {}
        self._closed = False
        self._waiting = 0
        self._room = asyncio.Event()
        self._room.set()
        self._sweeping: asyncio.Task[None] | None = None
        gauge = Gauge("tokenbus_policy_waiting_drafts", "Drafts that no policy has seen yet.", registry=registry)
        gauge.set_function(lambda: self._waiting)
        gauge = Gauge("tokenbus_policy_waiting_calls", "Calls of policies that wait for others.", registry=registry)
        gauge.set_function(lambda: self._executors.waiting_calls)
        gauge = Gauge("tokenbus_policy_executors", "Processes in which policies run.", registry=registry)
        gauge.set_function(lambda: self._executors.count)

    def logic(self, partition: int) -> PolicyLogic:
        """Create the logic of a partition, closing the one before."""
        if before := self._logics.pop(partition, None):
            before.close()
        made = self._logics[partition] = PolicyLogic(
            lambda run, names: self._run_task(partition, run, names), self._record_judged
        )
        if self._closed:  # the stage may load partitions until it stops, too
            made.close()
        return made

    def _record_judged(self, run: str, traceparent: str, policies: tuple[str, ...], since_ms: int) -> None:
        """Record the span of a run's policies: from its first draft to its end, in the worker that owns it then."""
        if trace := self._tracer.trace(run, traceparent):
            self._tracer.record(
                trace,
                Span(
                    name="policies",
                    span_id=trace.span("policies"),
                    parent_id=trace.root,
                    begin_ms=since_ms,
                    end_ms=time.time_ns() // 1_000_000,
                    attributes={"tokenbus.run.id": run, "tokenbus.policies": policies},
                ),
            )

    async def start(self, liveness: Liveness | None = None) -> None:
        """Start the executors. Raises SettingsError if a policy cannot be loaded or its options are invalid."""
        await self._executors.start(liveness or Liveness())

    async def open(self, server: Server, stage: Stage, liveness: Liveness | None = None) -> None:
        """Start judging."""
        self._server, self._stage = server, stage
        self._opened.set()
        self._sweeping = (liveness or Liveness()).start(self._sweep(), name="partitions")

    async def close(self) -> None:
        """Stop; another worker judges the rest."""
        self._closed = True
        if self._sweeping:
            self._sweeping.cancel()
        under_way = [task for logic in self._logics.values() for task in logic.close()]
        self._logics.clear()
        await asyncio.gather(*(task.closed() for task in under_way))
        await self._executors.stop()

    async def room(self) -> None:
        """Wait until few enough drafts are waiting to read more."""
        while not await wait_briefly(self._room):
            pass

    def _make_executors(self, settings: Settings) -> PolicyExecutors:
        limits = settings.limits
        # At most one per concurrent call, because the executors share the calls.
        processes = min(limits.policy_executors, limits.policy_calls_per_worker)
        assert settings.redis_url
        work = PolicyWork(
            policies={
                name: PolicySpec(
                    policy=policy.use,
                    options=policy.options,
                    on_error=policy.on_error,
                    timeout_s=policy.timeout_s,
                    name=name,
                )
                for name, policy in settings.policies.items()
            },
            calls=limits.policy_calls_per_worker // max(processes, 1),
            report_waiting_s=self._report_waiting_s,
            redis_url=settings.redis_url,
            prefix=settings.prefix,
            partitions=settings.partitions,
            run_ttl_ms=round(settings.retention.open_run_s * 1000),
        )
        if not processes:
            return InWorker(work)
        setup = Setup(
            service="policy",
            memory_bytes=limits.policy_memory_bytes,
            path=sys.path,
            log_level=settings.log_level,
            secrets=sorted(secrets_of(settings, os.environ)),
            work=msgspec.msgpack.encode(work),
        )
        return PolicyPool(work, setup, most=processes, on_end=self._executor_ended)

    def _executor_ended(self, end: End) -> None:
        self._ends.labels(end).inc()

    async def _sweep(self) -> None:
        """Close the logics of partitions that another worker owns by now."""
        assert self._stage
        while True:
            await rest(self._tick_s)
            for partition in [p for p in self._logics if self._stage.token_of(p) is None]:
                self._logics.pop(partition).close()

    def _run_task(self, partition: int, run: str, policies: tuple[str, ...]) -> PolicyRunTask:
        async def record() -> RunRecord | None:
            await self._opened.wait()
            assert self._server
            assert self._stage
            if (token := self._stage.token_of(partition)) is None:
                return None  # another worker owns the partition by now
            return ServerRunRecord(
                self._server, self._keys.within(partition), run, policies, token=token, on_decision=self._decided
            )

        return PolicyRunTask(
            run,
            policies,
            record=record,
            executors=self._executors,
            on_error=self._on_error,
            most_starts=self._limits.policy_starts,
            report_waiting_s=self._report_waiting_s,
            waiting=self._wait,
        )

    def _decided(self, decision: RecordedDecision) -> None:
        self._decisions.labels(decision.policy, decision.action).inc()
        if decision.action == "error":  # the class alone: an exception's text may quote the run
            log.warning("policy_failed", policy=decision.policy, error=decision.reason.partition(":")[0][:80])

    def _wait(self, more: int) -> None:
        self._waiting += more
        most = self._limits.policy_waiting_events
        if self._waiting > most:
            self._room.clear()
        elif self._waiting <= most // 2:
            self._room.set()


# To the stage runtime this is a logic without outputs. A run's state is its drafts: a new owner feeds all of them to
# new policies, and repeated verdicts change nothing (`tokenbus.core.run.gated_run`).


OnJudged = Callable[[str, str, tuple[str, ...], int], None]
"""Called when a run under policies has ended: its id, the publisher's trace context, its policies, and when its first
draft came.
"""
MakeRunTask = Callable[[str, tuple[str, ...]], PolicyRunTask]
"""Creates the task for a run and the names of its policies."""


class PolicyLogic(StageLogic):
    """The policy stage's logic (see `tokenbus.bus.stage.stage`)."""

    def __init__(
        self, make: MakeRunTask, on_judged: OnJudged = lambda run, traceparent, policies, since_ms: None
    ) -> None:
        self._make = make
        self._on_judged = on_judged
        self._began: dict[str, tuple[str, tuple[str, ...], int]] = {}
        """By open run: the further arguments of `on_judged`."""
        self._judged: list[tuple[str, str, tuple[str, ...], int]] = []
        self._tasks: dict[str, PolicyRunTask] = {}
        """By open run."""
        self._closed = False

    def apply(self, run: str, frame: bytes) -> None:
        drafts = drafts_decoder.decode(frame)
        if drafts.over:
            if began := self._began.get(run):
                self._judged.append((run, *began))
            self._end(run)
            return
        if run not in self._tasks:
            if not drafts.events or drafts.events[0].seq != 0:
                return  # the rest of a run that ended: its beginning was trimmed
            self._tasks[run] = self._make(run, drafts.policies)
            self._began[run] = (drafts.traceparent, drafts.policies, time.time_ns() // 1_000_000)
        self._tasks[run].add(frame, len(drafts.events))

    def fail(self, run: str, error: ErrorInfo) -> None:
        self._end(run)  # the parser's policy timeout decides about the run

    def abandon(self, run: str, error: ErrorInfo) -> None:
        self._end(run)

    def is_open(self, run: str) -> bool:
        return run in self._tasks

    def flush(self, commit: Commit) -> None:
        for judged in self._judged:
            self._on_judged(*judged)
        self._judged.clear()
        self._start()

    def discard_outputs(self) -> None:
        self._judged.clear()
        self._start()

    def snapshot(self, run: str) -> bytes:
        return msgspec.msgpack.encode(self._tasks[run].frames)

    def restore(self, run: str, state: bytes) -> None:
        for frame in msgspec.msgpack.decode(state, type=list[bytes]):
            self.apply(run, frame)

    def close(self) -> list[PolicyRunTask]:
        """Close all tasks, because another worker owns the partition. Returns the tasks still ending."""
        self._closed = True
        for task in self._tasks.values():
            task.close()
        return list(self._tasks.values())

    def _start(self) -> None:
        if not self._closed:
            for task in self._tasks.values():
                task.start()

    def _end(self, run: str) -> None:
        self._began.pop(run, None)
        if task := self._tasks.pop(run, None):
            task.close()

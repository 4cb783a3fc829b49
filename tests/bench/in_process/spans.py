"""What the six spans of a run cost, without the services: the services' own code makes them, and the exporter's thread
encodes and sends them. CPU is read by thread, so the collector in this process does not count.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import cast

import httpx
from prometheus_client import CollectorRegistry

from tests.collector import Collector, collector
from tokenbus.bus.server.clock import ServerClock
from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.state import RunState
from tokenbus.events.frames import Accepted, RunLimits
from tokenbus.events.public import Completed, Timing
from tokenbus.events.requests import Generate
from tokenbus.events.usage import Usage
from tokenbus_services.fetcher.calls.call_spans import CallFacts, CallSpans
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.intake.run_creation import record_accepted
from tokenbus_services.normalizer.logic import record_decoded
from tokenbus_services.parser.run_spans import RunSpans
from tokenbus_services.settings import OtelSettings, Settings
from tokenbus_services.telemetry import RunTracer, open_tracer

RUNS, ROUNDS, EXPORTS = 80, 15, 40
SENT_S, TIMEOUT_S = 0.05, 30.0
PROVIDER, MODEL = "anthropic", "model"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{:02x}"
ANSWER = httpx.Response(200, request=httpx.Request("POST", "http://127.0.0.1:8000/v1/messages"))


def costs_of_spans() -> tuple[float, float]:
    """Microseconds of CPU: what a sampled run costs more than another one, and what an export costs if it has the spans
    of a single run.
    """
    return asyncio.run(_costs())


async def _costs() -> tuple[float, float]:
    clock = ServerClock(_server_us)
    with collector() as received:
        others = set(threading.enumerate())
        settings = Settings(otel=OtelSettings(endpoint=received.url))
        tracer = open_tracer(settings, "bench", CollectorRegistry(), {"OTEL_BSP_SCHEDULE_DELAY": "100"})
        assert tracer
        exporting = [thread for thread in threading.enumerate() if thread not in others]
        assert exporting, "no thread exports"
        services = Services(tracer, settings, received, exporting, clock)
        services.cpu_us(RUNS, sampled=True)  # warm
        rounds = [services.cpu_us(RUNS, sampled=True) - services.cpu_us(RUNS, sampled=False) for _ in range(ROUNDS)]
        single = [services.cpu_us(1, sampled=True) for _ in range(EXPORTS)]
        await tracer.close()
    await clock.close()
    a_run = median(rounds) / RUNS
    return a_run, median(single) - a_run


class Services:
    """What the services do with a tracer at the steps of a run."""

    def __init__(
        self,
        tracer: RunTracer,
        settings: Settings,
        received: Collector,
        exporting: Sequence[threading.Thread],
        clock: ServerClock,
    ) -> None:
        self._received = received
        self._exporting = exporting
        self._tracer = tracer
        self._clock = clock
        self._calls = CallSpans(tracer)
        self._runs = RunSpans(tracer, settings)
        self._number = 0
        self._sampled = 0

    def cpu_us(self, runs: int, *, sampled: bool) -> float:
        """CPU of this thread and the exporter's for so many runs, until their spans are sent."""
        here, there = time.thread_time(), self._exported_s()
        for _ in range(runs):
            self._run(sampled)
        here = time.thread_time() - here
        self._sampled += runs * sampled
        deadline = time.monotonic() + TIMEOUT_S
        while self._received.raw.count(b"tokenbus.status") < self._sampled:  # a run's last span
            assert time.monotonic() < deadline, "spans did not arrive"
            time.sleep(SENT_S)
        time.sleep(SENT_S)  # the exporter reads its answer
        return (here + self._exported_s() - there) * 1e6

    def _exported_s(self) -> float:
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in self._exporting if thread.ident]
        return sum(map(time.clock_gettime, clocks))

    def _run(self, sampled: bool) -> None:
        self._number += 1
        run, now = f"bench-{self._number:032x}", _now_ms()
        traceparent = TRACEPARENT.format(sampled)
        request = Generate(id=run, provider=PROVIDER, model=MODEL, messages=[], traceparent=traceparent)
        record_accepted(self._tracer, run, request, self._clock.ms_of(now), self._clock.now_ms())
        of = cast(AttemptWriter, SimpleNamespace(run=run, turn=0, attempt=1))
        self._calls.waited(request, of, since_ms=now, until_ms=now)
        facts = CallFacts(_now_ms)
        with self._tracer.working(run, traceparent, "attempt", 1):
            facts.answered(ANSWER)
            facts.ended(None)
        self._calls.called(request, [], of, n=1, facts=facts)
        reader = AttemptReader(1)
        reader.opened_ms, reader.traceparent = now, traceparent
        record_decoded(self._tracer, run, 0, reader, _now_ms)
        accepted = Accepted(
            provider=PROVIDER,
            model=MODEL,
            on_failure="fail",
            max_tool_depth=0,
            rules=RunLimits(),
            tools=[],
            traceparent=traceparent,
        )
        state = RunState(run, accepted, now, BlockTable(0, 1, 100, 0))
        report = AttemptReport(
            turn=0,
            attempt=1,
            provider=PROVIDER,
            model=MODEL,
            outcome="ok",
            finish="stop",
            usage=Usage(input=100, output=400),
            handed_out_ms=now,
            called_ms=now,
            answered_ms=now,
            visible_ms=now,
            ended_ms=now,
            answered_model=MODEL,
            response_id="response",
            request_id="request",
        )
        self._runs.attempt_over(state, report)
        self._runs.lifecycle(
            state, Completed(run=run, seq=1, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=1))
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _server_us() -> int:
    return time.time_ns() // 1_000

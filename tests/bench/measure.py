"""One load through the services or the bare chain: its latencies, rate, CPU and commands."""

from __future__ import annotations

import time
from array import array
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import msgspec

from tests.bench import bare, subscriber
from tests.bench.jobs import CHAIN, Listen, Load, Received
from tests.bench.procs import cpu_s
from tests.bench.stack import PIPELINE, PROVIDER, SERVICES, Stack, service_of

SERVICES_COUNTED = (*SERVICES, "server", subscriber.NAME)
"""The processes on the path of a chunk. The mock provider is not counted."""
BARE_COUNTED = (*CHAIN, "server", subscriber.NAME)

ONLY_FROM_CLIENTS = frozenset(
    {"eval", "evalsha", "xread", "xreadgroup", "xautoclaim", "xgroup|delconsumer", "xinfo|consumers", "publish"}
)
"""Commands that our scripts never call. The server's statistics count a command from a script like any other."""
OF_THE_BENCH = frozenset({"blpop", "rpush", "info", "del", "client|setinfo", "hello", "select", "config|resetstat"})


class Sample(msgspec.Struct, frozen=True):
    """The results of one load."""

    chunks: int
    seconds: float
    """Seconds from the first chunk sent to the last one received."""
    latencies_ms: list[float]
    """Sorted."""
    cpu: dict[str, float]
    """Seconds by process, from before the load until after it."""
    counted: tuple[str, ...]
    """The processes on the path of a chunk."""
    sent: dict[str, int]
    """Commands from clients, by name; a script counts as one."""
    inside: dict[str, int]
    """Commands called by scripts."""

    def latency_ms(self, share: float) -> float:
        """The latency that this share of the chunks does not exceed."""
        return self.latencies_ms[min(len(self.latencies_ms) - 1, int(share * len(self.latencies_ms)))]

    def per_second(self) -> float:
        """Chunks received a second."""
        return self.chunks / self.seconds

    def cpu_us(self) -> float:
        """Microseconds of CPU per chunk, of all processes on its path."""
        return sum(self.cpu_us_of(name) for name in self.counted)

    def cpu_us_of(self, name: str) -> float:
        """Microseconds of CPU per chunk of one process."""
        return self.cpu[name] * 1e6 / self.chunks

    def sent_per_chunk(self) -> float:
        return sum(self.sent.values()) / self.chunks

    def inside_per_chunk(self) -> float:
        """Commands that scripts called, per chunk."""
        return sum(self.inside.values()) / self.chunks


class Meter:
    """Measures loads one after the other on a running stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def services(self, load: Load, *, settle_s: float = 0, **fields: object) -> Sample:
        """The load as requests through the services, each with these further fields. ``settle_s``: how long after the
        end of the last run the CPU of the services still counts.
        """
        stack = self._stack
        streams = self._visible()
        ready = self._listen(streams, load)
        before = self._state()
        runs = self._publish(load, load.name, fields)
        received = self._received(ready, load)
        self._ended(runs, b"completed")
        time.sleep(settle_s)
        counted = tuple(name for name in stack.pids if service_of(name) in (*SERVICES_COUNTED, PIPELINE))
        sample = self._sample(received, load, before, counted)
        stack.client.delete(*streams, *(stack.keys.log(run) for run in runs))
        return sample

    def bare(self, load: Load) -> Sample:
        """The load through the bare chain."""
        stack = self._stack
        ready = self._listen([bare.STREAMS[-1]], load)
        before = self._state()
        stack.desk.give("source", load)
        received = self._received(ready, load)
        stack.desk.answer("source", bool, load.timeout_s)
        sample = self._sample(received, load, before, BARE_COUNTED)
        stack.client.delete(*bare.STREAMS)
        return sample

    @contextmanager
    def held(self, load: Load, script: str) -> Generator[None]:
        """The load as runs whose provider stalls after the last chunk; at the end they are cancelled."""
        streams = self._visible()
        ready = self._listen(streams, load)
        runs = self._publish(load, script, {})
        self._received(ready, load)
        yield
        for run in runs:
            self._request({"type": "cancel", "run": run})
        self._ended(runs, b"cancelled")
        self._stack.client.delete(*streams, *(self._stack.keys.log(run) for run in runs))

    def idle(self, seconds: float) -> dict[str, float]:
        """CPU of each idle worker, in percent of a core."""
        pids = {name: self._stack.pids[name] for name in SERVICES}
        begin, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        took = time.monotonic() - begin
        return {name: (cpu_s(pid) - before[name]) / took * 100 for name, pid in pids.items()}

    # --- steps ------------------------------------------------------------------------------------------------

    def _listen(self, streams: list[str], load: Load) -> float:
        self._stack.desk.give(subscriber.NAME, Listen(streams, load.total, load.timeout_s))
        self._stack.desk.answer(subscriber.NAME, bool, timeout_s=30)
        return time.monotonic()

    def _visible(self) -> list[str]:
        return [self._stack.keys.topic(p, "visible") for p in range(self._stack.keys.partitions)]

    def _publish(self, load: Load, script: str, fields: Mapping[str, object]) -> list[str]:
        """Publish the requests as any program would, so that their chunks are spread evenly over the time."""
        runs = [f"bench-{uuid4().hex}" for _ in range(load.runs)]
        begin = time.monotonic()
        for number, run in enumerate(runs):
            time.sleep(max(0.0, begin + number * load.stagger_s - time.monotonic()))
            messages = [{"role": "user", "content": f"Run {number}"}]
            request = {"type": "generate", "id": run, "provider": PROVIDER, "model": script, "messages": messages}
            self._request({**request, **fields})
        return runs

    def _request(self, request: dict[str, object]) -> None:
        self._stack.client.xadd(self._stack.keys.requests, {"__data__": msgspec.json.encode(request)})

    def _received(self, begin: float, load: Load) -> Received:
        received = self._stack.desk.answer(subscriber.NAME, Received, load.timeout_s + 10)
        if (came := len(received.sent) // 8) != load.total:
            took = time.monotonic() - begin
            raise TimeoutError(f"{came} of {load.total} chunks came within {took:.0f} s")
        return received

    def _ended(self, runs: list[str], how: bytes) -> None:
        """Wait until all runs have ended, so that their end is counted too, and the next load starts on idle
        services.
        """
        deadline = time.monotonic() + 30
        for run in runs:
            while (status := self._stack.client.hget(self._stack.keys.run(run), "status")) != how:
                if time.monotonic() > deadline or status not in (None, b"open", b"cancelling"):
                    raise RuntimeError(f"run {run} is {status}, not {how.decode()}")
                time.sleep(0.01)

    def _state(self) -> tuple[dict[str, float], dict[str, int]]:
        calls: dict[str, Any] = self._stack.client.info("commandstats")
        counts = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in calls.items()}
        return {name: cpu_s(pid) for name, pid in self._stack.pids.items()}, counts

    def _sample(
        self, received: Received, load: Load, before: tuple[dict[str, float], dict[str, int]], counted: tuple[str, ...]
    ) -> Sample:
        after = self._state()
        sent, arrived = array("q", received.sent), array("q", received.arrived)
        made = {name: n - before[1].get(name, 0) for name, n in after[1].items() if name not in OF_THE_BENCH}
        made = {name: n for name, n in made.items() if n}
        scripts = counted is not BARE_COUNTED  # the bare chain has none
        inside = {name: n for name, n in made.items() if scripts and name not in ONLY_FROM_CLIENTS}
        return Sample(
            chunks=load.total,
            seconds=(max(arrived) - min(sent)) / 1e9,
            latencies_ms=sorted((there - here) / 1e6 for here, there in zip(sent, arrived, strict=True)),
            cpu={name: s - before[0][name] for name, s in after[0].items()},
            counted=counted,
            sent={name: n for name, n in made.items() if name not in inside},
            inside=inside,
        )

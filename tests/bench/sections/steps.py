"""The longest single step of a stage, and the longest script of the server, while a run of 8 MB passes through.

A step is the work of a stage for one round without a pause: apply it, build its commit and encode the command. No other
run of the worker continues during a step, and the server runs no other command during a script. The figures are CPU
time, which depends less on other programs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import redis

from tests.bench.figures import Figure
from tests.bench.procs import cpu_s
from tests.servers import binary
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.server.clients import _packed  # pyright: ignore[reportPrivateUsage]
from tokenbus.bus.stage.input import ReadBuffer
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.bus.stage.partition import Partition
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    Data,
    Ended,
    EventFrame,
    Opened,
    RawFrame,
    RawItem,
    RunLimits,
    encode,
)
from tokenbus.events.quirks import Quirks
from tokenbus_services.fetcher.writing.attempt_writer import FRAME_BYTES
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.parser.logic import ParserLogic
from tokenbus_services.process.embedded_server import EmbeddedServer

MOST_MS = 30.0
SIZE = 8_000_000
ROUNDS = 3
"""Each step and script counts with its fastest time: slower ones were disturbed."""
RUN, TTL_MS, TOKEN = "run", 600_000, "1-0"
_LINE = "0123456789" * 200 + " "

Json = dict[str, Any]


def longest_steps() -> list[Figure]:
    """Measure each kind of large run."""
    figures: list[Figure] = []
    for what, deltas in ways().items():
        with EmbeddedServer(binary=binary()) as server, closing(redis.Redis(port=server.port, protocol=2)) as client:
            passes = [Pass(client, server.pid, Keys(f"steps{n}", 1)) for n in range(ROUNDS)]
            for each in passes:
                each.go(b"".join(map(_event, [*deltas(), {"finish": True}])))
        for who in ("normalizer", "parser", "server"):
            longest = max(map(min, zip(*(each.ms[who] for each in passes), strict=True)))
            name = f"longest {'script' if who == 'server' else 'step'} of the {who}, {what}"
            figures.append(Figure(name=name, unit="ms", value=longest, aim=f"≤ {MOST_MS:g}", met=longest <= MOST_MS))
    return figures


def ways() -> dict[str, Callable[[], Iterator[Json]]]:
    """The provider's answers, by name."""
    numbers = json.dumps({"a": list(range(SIZE // 8))})
    objects = json.dumps({f"k{n}": {} for n in range(SIZE // 14)})
    return {
        "8 MB of text": lambda: ({"content": _LINE} for _ in range(SIZE // len(_LINE))),
        "4 MB of text in one event": lambda: iter([{"content": _LINE * (SIZE // 2 // len(_LINE))}]),
        "2 MB of words": lambda: ({"content": "a word "} for _ in range(SIZE // 4 // 7)),
        "8 MB of arguments, numbers": lambda: _call(numbers),
        "8 MB of arguments, small objects": lambda: _call(objects),
    }


def _call(arguments: str) -> Iterator[Json]:
    yield {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}
    for at in range(0, len(arguments), 2000):
        yield {"tool_calls": [{"index": 0, "function": {"arguments": arguments[at : at + 2000]}}]}


def _event(delta: Json) -> bytes:
    end = {"delta": {}, "finish_reason": "stop"}
    choice = {"index": 0, **(end if "finish" in delta else {"delta": delta})}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


class Pass:
    """One run on its way through both stages, as two workers would process it."""

    def __init__(self, client: Any, server: int, keys: Keys) -> None:
        """``server``: its process id."""
        self.ms: dict[str, list[float]] = {"normalizer": [], "parser": [], "server": []}
        """CPU of each step and script, in order."""
        self._client = client
        self._server = server
        self._keys = keys

    def go(self, answer: bytes) -> None:
        """Process the provider's answer, from its bytes to the end of the run."""
        keys = self._keys
        rules = RunLimits(block_chars=2 * SIZE)
        accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=rules, tools=[])
        self._client.xadd(keys.topic(0, "events"), {RUN: encode(EventFrame(0, CONTROL_ATTEMPT, 1, [accepted]))})
        opened = Opened(
            api="openai-chat", status=200, headers={"content-type": "text/event-stream"}, stream=True, quirks=Quirks()
        )
        pieces = [Data(answer[at : at + FRAME_BYTES]) for at in range(0, len(answer), FRAME_BYTES)]
        items: list[RawItem] = [opened, *pieces, Ended()]
        for n, item in enumerate(items):
            self._client.xadd(keys.topic(0, "raw"), {RUN: encode(RawFrame(0, 1, n, 1, [item]))})
        self._stage("normalizer", "raw", NormalizerLogic(0, keys))
        topics = ("visible", "chunks", "blocks")
        parser = ParserLogic(0, keys, topics=topics, lifetimes=RunLifetimes(TTL_MS, TTL_MS))
        self._stage("parser", "events", parser)
        [(_, last)] = self._client.xrevrange(keys.log(RUN), count=1)
        end = msgspec.json.decode(last[b"__data__"])
        if end["type"] != "completed":
            raise RuntimeError(f"the run ended {end}")

    def _stage(self, group: str, topic: InternalTopic, logic: StageLogic) -> None:
        keys = self._keys
        self._client.hset(keys.lease(0, group), mapping={"token": TOKEN, "offset": "0-0"})
        part = Partition(Lease(0, TOKEN, "0-0", "0-0"), logic, keys=keys, topic=topic, group=group)
        buffer = ReadBuffer(max_entries=256)
        while True:
            found: Sequence[Any] = self._client.xrange(part.stream, f"({part.offset}", count=buffer.count)
            if not found:
                return
            buffer.add(part, part.offset, found)
            while batches := buffer.next_round({part.stream: part}, lambda _: True):
                [batch] = batches
                begun = time.thread_time()
                work = part.apply_and_build(batch.entries)
                call = work.commit.call(
                    token=TOKEN,
                    ttl_ms=TTL_MS,
                    begin=batch.begin,
                    end=part.offset,
                    watermark=part.watermark,
                    entries=len(batch.entries),
                    size=work.size,
                    mirror="",
                    entries_read=True,
                    topic_entries=50_000,
                )
                command = ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
                packed = _packed(self._client.connection, command)
                self.ms[group].append((time.thread_time() - begun) * 1000)
                del packed
                self._run(call.script.text, command)

    def _run(self, script: str, command: tuple[Any, ...]) -> None:
        self._client.script_load(script)
        begun = cpu_s(self._server)
        reply: list[Any] = self._client.execute_command(*command)
        self.ms["server"].append((cpu_s(self._server) - begun) * 1000)
        if reply[0] != b"ok":
            raise RuntimeError(f"the server refused the commit: {reply}")

"""Handlers of a real FastStream app in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from faststream.redis import RedisBroker, TestRedisBroker

from tests.contract.client.writer import Writer
from tokenbus import Chunk, Completed, Sentence
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import Malformed
from tokenbus.events.decisions import Decided, encode
from tokenbus.events.public import Timing
from tokenbus.faststream import BusRouter

APP = """
import asyncio, sys
from faststream import Depends, FastStream
from faststream.redis import RedisBroker, TestRedisBroker
from tokenbus import BlockComplete, BlockStarted, Chunk, Decided, Sentence, Started
from tokenbus.faststream import BusRouter

url, prefix = sys.argv[1:]
broker = RedisBroker(url)
bus = BusRouter(broker, url, prefix=prefix, partitions=4)
failed = set()

async def about() -> str:
    return "injected"

@bus.subscriber("visible", group="g", from_="start", kinds=["text"], concurrency=4)
async def visible(chunk: Chunk, given: str = Depends(about)) -> None:
    print("visible", type(chunk).__name__, chunk.run, chunk.seq, given, flush=True)

@bus.subscriber("blocks", from_="start", runs=["a"])
async def blocks(event: BlockStarted | BlockComplete) -> None:
    print("blocks", type(event).__name__, event.run, event.seq, flush=True)

@bus.subscriber("sentences", from_="start", runs=["a"])
async def sentences(sentence: Sentence) -> None:
    print("sentences", sentence.text, flush=True)

@bus.subscriber("decisions", group="audit", from_="start")
async def decisions(decided: Decided) -> None:
    print("decisions", decided.run, decided.n, decided.action, flush=True)

@bus.subscriber("runs", group="again", from_="start", runs=["a"], kinds=["started"], on_error="again")
async def again(event: Started) -> None:
    if event.seq not in failed:
        failed.add(event.seq)
        raise ZeroDivisionError
    print("again", event.seq, flush=True)

@bus.subscriber("runs", group="hopeless", from_="start", runs=["b"], on_error="again", tries=3)
async def hopeless(event: object) -> None:
    print("hopeless", event.seq, flush=True)
    if event.seq == 0:
        raise ZeroDivisionError

@bus.subscriber("runs", from_="start", runs=["b"])
async def skipped(event: object) -> None:
    if event.seq == 0:
        raise ZeroDivisionError
    print("skipped", event.seq, flush=True)

asyncio.run(FastStream(broker).run())
"""


@asynccontextmanager
async def app(url: str, keys: Keys, log: Path) -> AsyncGenerator[Process]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", APP, url, keys.prefix, stdout=PIPE, stderr=errors
        )
    try:
        yield process
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_handlers_get_typed_events_in_order_and_those_that_fail_are_skipped_or_come_again(
    server_url: str, server: Server, keys: Keys, tmp_path: Path
):
    for run in ("a", "b"):
        writer = Writer(server, keys, run)
        await writer.start()
        await writer.block("Hello you there. And more")
        await writer.say("!")
        await writer.complete()
    decisions = keys.topic(keys.partition_of("a"), "decisions")
    newer = {"type": "verdict", "run": "a", "n": 0, "turn": 0, "attempt": 1}
    decided = Decided(run="a", n=1, turn=0, attempt=1, policy="guard", action="block")
    for data in (json.dumps(newer), encode(decided)):
        await server.client.xadd(decisions, {"__data__": data})
    expected = {
        *(f"visible Chunk {run} {seq} injected" for run in ("a", "b") for seq in (2, 4)),
        *("blocks BlockStarted a 1", "blocks BlockComplete a 3"),
        *("sentences Hello you there. ", "sentences And more!"),
        *("again 0", "skipped 5", "decisions a 1 block", "hopeless 5"),
    }
    seen: list[str] = []
    logged: list[str] = []
    async with app(server_url, keys, tmp_path / "app.log") as process:
        assert process.stdout
        while not expected <= set(seen):
            line = (await process.stdout.readline()).decode()
            assert line, (tmp_path / "app.log").read_text()
            if line.startswith(("visible", "blocks", "sentences", "again", "skipped", "decisions", "hopeless")):
                seen.append(line.rstrip("\n"))
            else:
                logged.append(line)
    assert [line for line in seen if line.startswith("visible Chunk a")] == [
        f"visible Chunk a {seq} injected" for seq in (2, 4)
    ]
    assert sum(line.startswith("decisions") for line in seen) == 1, "one that the router does not know is passed over"
    assert sum(line.startswith("again") for line in seen) == 1
    assert seen.count("hopeless 0") == 3, "an event whose handler always fails is given up"
    assert any("Event 0 of run b failed 3 times and is skipped" in line for line in logged)
    assert any("b/0" in line and "ZeroDivisionError" in line for line in logged), "FastStream's lines name the event"


async def test_the_test_broker_of_faststream_hands_events_to_handlers_without_a_server():
    broker = RedisBroker()
    bus = BusRouter(broker, "redis://localhost")
    seen: list[object] = []

    @bus.subscriber("visible", group="tts")
    async def speak(chunk: Chunk) -> None:
        seen.append(chunk)

    @bus.subscriber("sentences")
    async def say(sentence: Sentence) -> None:
        seen.append(sentence)

    @bus.subscriber("runs")
    async def fail(event: Completed) -> None:
        raise ZeroDivisionError

    chunk = Chunk(run="r", seq=3, turn=0, attempt=1, block=0, kind="text", text="Hi", visible=True, depth=0)
    sentence = Sentence(run="r", turn=0, attempt=1, block=0, text="Hi.", first=3, last=4)
    ended = Completed(run="r", seq=9, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=1))
    async with TestRedisBroker(broker):
        await broker.publish(msgspec.to_builtins(chunk), stream="tokenbus:visible")
        await broker.publish(msgspec.json.encode(sentence), stream="tokenbus:sentences")
        with pytest.raises(ZeroDivisionError):
            await broker.publish(msgspec.to_builtins(ended), stream="tokenbus:runs")
        with pytest.raises(Malformed):
            await broker.publish({"type": "chunk"}, stream="tokenbus:visible")
    assert seen == [chunk, sentence]


def test_an_invalid_subscriber_is_refused_at_its_definition():
    bus = BusRouter(RedisBroker(), "redis://localhost")
    with pytest.raises(ValueError, match="group"):
        bus.subscriber("visible", group="a b")
    with pytest.raises(ValueError, match="kinds"):
        bus.subscriber("visible", kinds=["sentence"])

"""Handlers of a real FastStream app in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec
import pytest
from faststream.redis import RedisBroker, TestRedisBroker

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Completed, Sentence
from tokenbus.bus.dead_letters import newest_dead_letters
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
async def app(url: str, keys: Keys, log: Path, code: str = APP, killed: bool = False) -> AsyncGenerator[Process]:
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, url, keys.prefix, stdout=PIPE, stderr=errors
        )
    try:
        yield process
        if not killed:
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
    assert "runs:hopeless: event 0 of run b is dead" in (tmp_path / "app.log").read_text()
    (letter,) = [dead.entry async for dead in newest_dead_letters(server, keys, most=2)]
    assert (letter.run, letter.seq, letter.group) == ("b", 0, "runs:hopeless")
    assert any("b/0" in line and "ZeroDivisionError" in line for line in logged), "FastStream's lines name the event"


POISON = """
import asyncio, os, signal, sys
from faststream import FastStream
from faststream.redis import RedisBroker
from tokenbus import Started
from tokenbus.faststream import BusRouter

url, prefix = sys.argv[1:]
broker = RedisBroker(url)
bus = BusRouter(broker, url, prefix=prefix, partitions=4)
beside = asyncio.Event()

@bus.subscriber("runs", group="g", from_="start", on_error="again", tries=2, concurrency=2)
async def handle(event: Started) -> None:
    print("try", event.run, flush=True)
    if event.run.startswith("fails"):
        raise ZeroDivisionError
    if event.run.startswith("kills"):
        await asyncio.wait({asyncio.ensure_future(beside.wait())}, timeout=1)
        os.kill(os.getpid(), signal.SIGKILL)
    beside.set()
    if event.run.startswith("beside"):
        await asyncio.sleep(1)  # in hand when the process is killed

asyncio.run(FastStream(broker).run())
"""


class Crowd:
    """FastStream processes, and what they print."""

    def __init__(self, url: str, keys: Keys, log: Path) -> None:
        self._args = (url, keys, log, POISON)
        self._stack = AsyncExitStack()
        self.lines: list[tuple[Process, str]] = []
        self._readers: list[asyncio.Task[None]] = []

    async def start(self) -> Process:
        process = await self._stack.enter_async_context(app(*self._args, killed=True))
        self._readers.append(asyncio.create_task(self._read(process)))
        return process

    async def _read(self, process: Process) -> None:
        assert process.stdout
        async for line in process.stdout:
            self.lines.append((process, line.decode().rstrip()))

    def tries(self, run: str) -> list[Process]:
        """The process of each call of the handler with the run's event."""
        return [process for process, line in self.lines if line == f"try {run}"]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await asyncio.gather(*self._readers)


async def dead(server: Server, keys: Keys) -> list[tuple[str | None, int | None]]:
    return [(one.entry.run, one.entry.seq) async for one in newest_dead_letters(server, keys, most=9)]


async def test_tries_survive_a_killed_process_and_the_log_names_run_and_seq(
    server_url: str, server: Server, keys: Keys, tmp_path: Path
):
    run, done = "fails-0192f0c1-7b1e-7a44-9c1d-0d6a3f1e8b52", "done-0192f0c1-7b1e-7a44-9c1d-0d6a3f1e8b52"
    async with Crowd(server_url, keys, tmp_path / "app.log") as crowd:
        first, second = await crowd.start(), await crowd.start()
        await Writer(server, keys, run).start()
        await eventually(lambda: crowd.tries(run))
        (killed,) = crowd.tries(run)
        killed.kill()
        await eventually(lambda: dead(server, keys))
        await Writer(server, keys, done).start()
        await eventually(lambda: crowd.tries(done))
        tried = crowd.tries(run)
    assert len(tried) == 2
    assert set(tried[1:]) == {second if killed is first else first}
    assert await dead(server, keys) == [(run, 0)]
    logged = [line for _, line in crowd.lines if f" {run}/0 " in line]
    assert sum("ZeroDivisionError" in line for line in logged) == 2, crowd.lines
    assert not [line for line in logged if "Processed" in line]
    assert any(f" {done}/0 " in line and "Processed" in line for _, line in crowd.lines)


async def test_an_event_that_kills_its_process_is_buried_and_not_what_was_handled_beside_it(
    server_url: str, server: Server, keys: Keys, tmp_path: Path
):
    runs = ["kills", "beside"]
    for run in runs:
        await Writer(server, keys, run).start()
    async with Crowd(server_url, keys, tmp_path / "app.log") as crowd:
        while not await dead(server, keys):
            process = await crowd.start()
            gone = asyncio.ensure_future(process.wait())
            await eventually(lambda gone=gone: _over(gone, server, keys))
        await eventually(lambda: crowd.tries("beside")[-1] is process)
    assert await dead(server, keys) == [("kills", 0)]
    assert len(crowd.tries("kills")) == 2, "each death is a try, the first too"


async def _over(gone: asyncio.Future[int], server: Server, keys: Keys) -> bool:
    return gone.done() or bool(await dead(server, keys))


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
    with pytest.raises(ValueError, match="group"):
        bus.subscriber("visible", on_error="again")
    with pytest.raises(ValueError, match="kinds"):
        bus.subscriber("visible", kinds=["sentence"])

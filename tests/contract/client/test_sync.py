"""The client for scripts, used from a thread that has no event loop, and from a real script that is interrupted."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus.errors import RunNotFound, ServerUnavailable
from tokenbus.sync import Client

T = TypeVar("T")
REQUEST = {"provider": "p", "model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def script(url: str, keys: Keys, work: Callable[[Client], T]) -> T:
    """What a script does with its client; afterwards no thread is left."""

    def run() -> T:
        with Client(url, prefix=keys.prefix, partitions=keys.partitions) as bus:
            return work(bus)

    done = await asyncio.to_thread(run)
    assert "tokenbus" not in {thread.name for thread in threading.enumerate()}
    return done


async def test_a_run_is_followed_and_its_result_taken(server_url: str, keys: Keys, writer: Writer):
    await writer.start()
    await writer.block("Hello")
    await writer.complete()
    seen, text = await script(server_url, keys, lambda bus: (list(bus.follow("r")), bus.result("r").text))
    assert (seen, text) == (writer.events, "Hello")


async def test_elements_of_an_answer_are_read(server_url: str, keys: Keys, writer: Writer):
    await writer.start()
    await writer.block('{"a": [1, 2]}')
    await writer.complete()

    def work(bus: Client) -> list[object]:
        run = bus.publish({**REQUEST, "id": "r"})
        return [element.value for element in run.elements("a.*", after=0)]

    assert await script(server_url, keys, work) == [2]


async def test_a_request_is_published_streamed_and_cancelled(server_url: str, server: Server, keys: Keys):
    def work(bus: Client) -> str:
        run = bus.publish(REQUEST)
        run.cancel("enough")
        events = bus.stream({**REQUEST, "id": "streamed"})
        events.close()
        return run.id

    run = await script(server_url, keys, work)
    entries = [fields[b"__data__"].decode() for _, fields in await server.client.xrange(keys.requests)]
    assert [run in entries[0], "enough" in entries[1], "streamed" in entries[2]] == [True] * 3


async def test_a_group_is_shared_and_acknowledged(server_url: str, keys: Keys, writer: Writer):
    await writer.say("a", "b", "c")

    def first(bus: Client) -> list[str]:
        with bus.subscribe("visible", kinds=Chunk, group="g", from_="start", ack="explicit") as events:
            taken = [next(events), next(events)]
            events.ack(taken[0])
            return [event.text for event in taken]

    def second(bus: Client) -> str:
        with bus.subscribe("visible", kinds=Chunk, group="g") as events:
            return next(events).text

    assert await script(server_url, keys, first) == ["a", "b"]
    assert await script(server_url, keys, second) == "b"


async def test_sentences_and_cursors_come_as_they_do_in_the_asynchronous_client(
    server_url: str, keys: Keys, writer: Writer
):
    await writer.say("One is here. Two", " is here. Three")

    def work(bus: Client) -> tuple[str, str, str]:
        with bus.sentences(from_="start") as sentences:
            texts = next(sentences).text, next(sentences).text
        with bus.subscribe("visible", kinds=Chunk, from_="start") as events:
            next(events)
            cursor = events.cursor
        with bus.subscribe("visible", kinds=Chunk, from_=cursor) as events:
            return *texts, next(events).text

    assert await script(server_url, keys, work) == ("One is here. ", "Two is here. ", " is here. Three")


async def test_errors_are_the_clients_own_and_a_closed_client_raises(server_url: str, keys: Keys):
    def missing(bus: Client) -> None:
        with pytest.raises(RunNotFound):
            list(bus.follow("nobody", wait_s=0.01))
        with pytest.raises(RunNotFound):
            bus.retry("nobody")
        with pytest.raises(RunNotFound):
            bus.resume("nobody")

    await script(server_url, keys, missing)
    with pytest.raises(RuntimeError, match="with"):
        Client(server_url).result("r")
    with pytest.raises(ServerUnavailable), Client("redis://127.0.0.1:1"):
        pass


async def test_a_generator_used_after_its_clients_close_raises_an_error(server_url: str, keys: Keys, writer: Writer):
    await writer.start()

    def begin(bus: Client) -> object:
        events = bus.follow("r")
        next(events)
        return events

    events = await script(server_url, keys, begin)
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.to_thread(next, events)  # pyright: ignore[reportArgumentType, reportCallIssue]


SCRIPT = """
import sys
from tokenbus.sync import Client
with Client(sys.argv[1], prefix=sys.argv[2], partitions=4) as bus:
    try:
        for event in bus.follow("r"):
            print(event.seq, flush=True)
    except KeyboardInterrupt:
        print("interrupted")
assert not {"faststream", "httpx", "pydantic"} & set(sys.modules)
"""


async def test_ctrl_c_ends_a_script_that_waits(server_url: str, server: Server, keys: Keys, writer: Writer):
    await join_deployment(server, keys)
    await writer.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, server_url, keys.prefix, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout
    try:
        assert await process.stdout.readline() == b"0\n"
        await eventually(lambda: _waits(server))
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out, err) == (0, b"interrupted\n", b"")


FORKING = """
import os, sys
from tokenbus.sync import Client
bus = Client(sys.argv[1], prefix=sys.argv[2], partitions=4).open()
events = bus.follow("r")
seen = [next(events).seq]
runs = bus.subscribe("runs", from_="start").__enter__()
seen.append(next(runs).seq)
child = os.fork()
if not child:
    try:
        next(events)
    except RuntimeError as e:
        print("child:", e, flush=True)
    asked = {"id": "of-the-child", "provider": "p", "model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    print("child:", bus.publish(asked).id, flush=True)
    print("child:", next(bus.follow("r")).seq, flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent: the child has ended", flush=True)
seen += [event.seq for event in events] + [next(runs).seq]
print("parent:", seen, bus.result("r", timeout=60).text, flush=True)
bus.close()
"""


async def test_a_forked_process_has_connections_of_its_own_and_its_parent_keeps_its_own(
    server_url: str, server: Server, keys: Keys, writer: Writer
):
    await join_deployment(server, keys)
    await writer.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKING, server_url, keys.prefix, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout
    try:
        lines = [(await process.stdout.readline()).decode() for _ in range(4)]
        await writer.block("Hello")  # after the child's end: its parent still hears of it
        await writer.complete()
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    sequence = [e.seq for e in writer.events]
    seen = [0, 0, *sequence[1:], sequence[-1]]
    assert lines[0].startswith("child: this was opened before the process forked"), (lines, out, err)
    assert lines[1:] == ["child: of-the-child\n", "child: 0\n", "parent: the child has ended\n"], (lines, err)
    assert (process.returncode, out.decode(), err) == (0, f"parent: {seen} Hello\n", b"")


async def test_a_result_waits_no_longer_than_its_timeout(server_url: str, keys: Keys, writer: Writer):
    await writer.start()

    def work(bus: Client) -> None:
        with pytest.raises(TimeoutError):
            bus.result("r", timeout=0.05)

    await script(server_url, keys, work)


async def _waits(server: Server) -> bool:
    return any(c["cmd"] == "xread" and "b" in c["flags"] for c in await server.client.client_list())

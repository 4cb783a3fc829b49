"""Following one run: stored events, then live ones, also across lost connections."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client, ErrorInfo, PublicEvent, Run, RunFailedEvent, Timing
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.run_record import STATUS
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import LARGEST_PAGE, PAGE_BYTES, Pages
from tokenbus.client.log_reader import LogReader
from tokenbus.client.tailing import READS, ROOM, StreamFeed
from tokenbus.errors import (
    CursorAhead,
    CursorTrimmed,
    Malformed,
    RequestInvalid,
    RunFailed,
    RunLost,
    RunNotFound,
    ServerUnavailable,
)
from tokenbus_services.process.embedded_server import EmbeddedServer


async def readers(server: Server) -> list[dict[str, str]]:
    """The connections that wait in a blocking read."""
    found: list[dict[str, str]] = await server.client.client_list()
    return [c for c in found if c["cmd"] == "xread" and "b" in c["flags"]]


async def collect(events: AsyncIterator[PublicEvent], into: list[PublicEvent]) -> None:
    async for event in events:
        into.append(event)  # noqa: PERF401 - what came so far is looked at meanwhile


async def all_of(events: AsyncIterator[PublicEvent]) -> list[PublicEvent]:
    return [event async for event in events]


async def test_a_finished_run_is_replayed_whole(bus: Client, writer: Writer):
    await writer.start()
    await writer.say(*(f"{i} " for i in range(600)))
    await writer.complete()
    assert await all_of(bus.follow("r")) == writer.events


async def test_a_reader_takes_a_page_of_bounded_size_however_large_the_entries_are(bus: Client, writer: Writer):
    await writer.start()
    for n in range(60):
        await writer.say(f"{n} ".ljust(100_000))
    await writer.say(*["small"] * 1_000)
    for n in range(60):
        await writer.say(f"{n} ".ljust(100_000))
    await writer.complete()
    deployment = bus._deployment  # pyright: ignore[reportPrivateUsage]
    pages: list[list[PublicEvent]] = []
    async with LogReader(deployment, "r", after=-1, wait_s=0) as reader:
        while not reader.ended:
            pages.append(await reader.read())
    assert [event for page in pages for event in page] == writer.events
    sizes = [sum(len(event.text) for event in page if isinstance(event, Chunk)) for page in pages]
    assert max(sizes) <= PAGE_BYTES
    assert max(map(len, pages)) == LARGEST_PAGE


def test_a_page_of_small_entries_grows_to_the_largest():
    pages, counts = Pages(), list[int]()
    for _ in range(6):
        counts.append(pages.count)
        pages.fit([(b"0-1", {b"__data__": b"small"})] * pages.count)
    assert counts == [16, 32, 64, 128, 256, 256]
    large = (b"0-1", {b"__data__": bytes(2 * PAGE_BYTES)})
    assert pages.fit([large, large]) == [large]
    assert pages.count == 1


async def test_a_run_is_followed_from_before_it_is_known_to_its_end(bus: Client, server: Server, writer: Writer):
    seen: list[PublicEvent] = []
    task = asyncio.create_task(collect(bus.follow("r"), seen))
    await eventually(lambda: readers(server))
    assert not seen
    await writer.accept()
    await writer.start()
    await eventually(lambda: seen == writer.events)
    for text in ("one ", "two ", "three"):
        await writer.say(text)
        await eventually(lambda: seen == writer.events)
    await writer.complete()
    await task
    assert seen == writer.events


async def test_every_seq_is_a_cursor_to_resume_from_over_attempts_too(bus: Client, writer: Writer):
    await writer.start()
    for text in ("a", "b", "c"):
        await writer.say(text, text)
        await writer.retry()
    writer.attempt += 5  # attempts that were lost before they wrote anything
    await writer.say("d")
    await writer.complete()
    for after in range(-1, len(writer.events)):
        assert await all_of(bus.follow("r", after=after)) == writer.events[after + 1 :]


async def test_a_cursor_past_the_newest_event_raises_an_error(bus: Client, writer: Writer):
    await writer.start()
    with pytest.raises(CursorAhead, match=r"the cursor 1 is past the newest entry, 0"):
        await anext(bus.follow("r", after=1))
    await writer.complete()
    with pytest.raises(CursorAhead):
        await anext(bus.follow("r", after=2))
    with pytest.raises(RunNotFound):  # it was seen once, so it is not waited for
        await anext(bus.follow("another", after=0, wait_s=None))
    wrong: Any = "7"
    for after in (-2, wrong, True):
        with pytest.raises(ValueError, match="after"):
            bus.follow("r", after=after)


async def test_resuming_in_a_live_run_hands_over_without_gap_or_double(bus: Client, writer: Writer):
    await writer.start()
    await writer.say("a", "b")
    await writer.retry()
    follower: list[PublicEvent] = []
    newest: list[PublicEvent] = []
    tasks = [
        asyncio.create_task(collect(bus.follow("r", after=1), follower)),
        asyncio.create_task(collect(bus.follow("r", after=3), newest)),
    ]
    await eventually(lambda: follower == writer.events[2:])
    for i in range(50):
        await writer.say(str(i))
    await writer.complete()
    await asyncio.gather(*tasks)
    assert follower == writer.events[2:]
    assert newest == writer.events[4:]


async def test_a_cursor_at_the_terminal_event_gives_nothing_and_ends(bus: Client, writer: Writer):
    await writer.start()
    await writer.complete()
    assert await all_of(bus.follow("r", after=1)) == []


async def test_a_killed_connection_costs_no_event_and_repeats_none(bus: Client, server: Server, writer: Writer):
    await writer.start()
    seen: list[PublicEvent] = []
    task = asyncio.create_task(collect(bus.follow("r"), seen))
    for i in range(10):
        await eventually(lambda: _count(server, 1))
        [reader] = await readers(server)
        await server.client.client_kill_filter(_id=reader["id"])
        await writer.say(str(i))
        await eventually(lambda: seen == writer.events)
    await writer.complete()
    await task
    assert seen == writer.events


async def test_a_log_whose_beginning_was_trimmed_is_an_error(bus: Client, server: Server, writer: Writer):
    await writer.start()
    await writer.say("a", "b", "c")
    await writer.complete()
    await server.client.xtrim(writer.log, minid="1-2", approximate=False)
    for after in (-1, 0):
        with pytest.raises(CursorTrimmed) as caught:
            await all_of(bus.follow("r", after=after))
        assert (caught.value.key, caught.value.cursor, caught.value.oldest) == (writer.log, str(after), "2")
    assert await all_of(bus.follow("r", after=1)) == writer.events[2:]


async def test_a_gap_in_the_middle_is_an_error_after_what_came_before_it(bus: Client, server: Server, writer: Writer):
    await writer.start()
    await writer.say("a", "b", "c")
    await server.client.xdel(writer.log, "1-2")
    seen: list[PublicEvent] = []
    with pytest.raises(CursorTrimmed):
        await collect(bus.follow("r"), seen)
    assert seen == writer.events[:2]


async def test_a_slow_reader_misses_nothing(bus: Client, writer: Writer):
    await writer.start()
    seen: list[PublicEvent] = []
    async with aclosing(bus.follow("r")) as events:
        async for event in events:
            seen.append(event)
            if len(writer.events) < 1000:
                await writer.say("x", "y", "z")  # always three ahead of each one read
            elif len(seen) == 1000:
                await writer.complete()
    assert seen == writer.events


async def test_an_unknown_run_is_not_found_in_time(bus: Client):
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    with pytest.raises(RunNotFound) as caught:
        await all_of(bus.follow("nobody", wait_s=0.3))
    assert caught.value.run == "nobody"
    assert loop.time() - started_at >= 0.3


async def test_a_client_waits_for_a_run_cancelled_before_its_request_as_long_as_for_an_unknown_one(
    bus: Client, server: Server, keys: Keys
):
    await server.client.hset(keys.run("ghost"), STATUS, "awaited")
    await server.client.pexpire(keys.run("ghost"), 60_000)
    with pytest.raises(RunNotFound):
        await all_of(bus.follow("ghost", wait_s=0.05))


async def test_waiting_continues_for_a_known_run_without_a_worker(bus: Client, writer: Writer):
    await writer.accept()
    seen: list[PublicEvent] = []
    task = asyncio.create_task(collect(bus.follow("r", wait_s=0.05), seen))
    done, _ = await asyncio.wait({task}, timeout=0.3)
    assert not done
    await writer.start()
    await writer.complete()
    await task
    assert seen == writer.events


async def test_a_run_whose_records_expire_meanwhile_is_lost(bus: Client, server: Server, keys: Keys, writer: Writer):
    await writer.start()
    seen: list[PublicEvent] = []
    task = asyncio.create_task(collect(bus.follow("r"), seen))
    await eventually(lambda: seen)
    await server.client.unlink(writer.log, keys.run("r"))
    with pytest.raises(RunLost):
        await task


async def test_an_entry_that_is_no_event_is_named(bus: Client, server: Server, writer: Writer):
    await writer.start()
    await server.client.xadd(writer.log, {"__data__": "{}"}, id="1-1")
    with pytest.raises(Malformed, match=r"log:r 1-1"):
        await all_of(bus.follow("r"))


async def test_an_id_that_no_run_can_have_is_refused(bus: Client):
    with pytest.raises(RequestInvalid):
        bus.follow("a b")


async def test_followers_share_a_connection_and_leave_neither_it_nor_a_task(
    server_url: str, bus: Client, server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tokenbus.client.tailing.IDLE_S", 0.01)
    writers = [Writer(server, keys, f"r{i}") for i in range(20)]
    await ids(server)
    await writers[0].accept()  # by a second connection, for it is a pipeline
    tasks = asyncio.all_tasks()
    before = await ids(server)
    async with Client(server_url, prefix=keys.prefix, partitions=4) as other:
        seen: list[list[PublicEvent]] = [[] for _ in writers]
        followers = [asyncio.create_task(collect(other.follow(w.run), s)) for w, s in zip(writers, seen, strict=True)]
        for writer in writers:
            await writer.start()
            await writer.say("a")
        await eventually(lambda: seen == [w.events for w in writers])
        await eventually(lambda: _count(server, 1))
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        await eventually(lambda: asyncio.all_tasks() == tasks)
        await eventually(lambda: _count(server, 0))
    await eventually(lambda: _none_since(server, before))


async def _count(server: Server, expected: int) -> bool:
    return len(await readers(server)) == expected


async def ids(server: Server) -> set[str]:
    return {client["id"] for client in await server.client.client_list()}


async def _none_since(server: Server, before: set[str]) -> bool:
    return not await ids(server) - before


async def test_a_user_without_the_unblock_right_can_follow_many_runs(server_url: str, server: Server, keys: Keys):
    user = f"u{keys.prefix}"
    await server.client.acl_setuser(user, enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-client"])
    try:
        url = server_url.replace("redis://", f"redis://{user}:pw@")
        async with Client(url, prefix=keys.prefix, partitions=4) as bus:
            seen: dict[str, list[PublicEvent]] = {"a": [], "b": []}
            writers = [Writer(server, keys, run) for run in seen]
            tasks: list[asyncio.Task[None]] = []
            for writer in writers:
                tasks.append(asyncio.create_task(collect(bus.follow(writer.run), seen[writer.run])))
                await writer.start()
                await eventually(lambda w=writer: seen[w.run] == w.events)
                await eventually(lambda: _count(server, 1))
            for writer in reversed(writers):
                await writer.complete()
            await asyncio.gather(*tasks)
    finally:
        await server.client.acl_deluser(user)
    assert seen == {w.run: w.events for w in writers}


async def test_a_stalled_follower_delays_no_other_and_buffers_a_bounded_part(bus: Client, server: Server, keys: Keys):
    slow, quick = Writer(server, keys, "slow"), Writer(server, keys, "quick")
    await slow.start()
    await quick.start()
    seen: list[PublicEvent] = []
    task = asyncio.create_task(collect(bus.follow("quick"), seen))
    async with aclosing(bus.follow("slow")) as events:
        got = [await anext(events)]
        waiting = asyncio.ensure_future(anext(events))
        await eventually(lambda: _count(server, 1))
        await slow.say("taken")
        got.append(await waiting)
        for i in range(20):
            await slow.say(*["x"] * 100)
            await quick.say(str(i))
            await eventually(lambda: seen == quick.events)
        assert sum(len(feed.entries) for feed in gc.get_objects() if isinstance(feed, StreamFeed)) < 2 * ROOM
        await slow.complete()
        await quick.complete()
        got += [event async for event in events]
    await task
    assert got == slow.events


async def test_ten_thousand_follows_of_finished_runs_take_few_connections_and_leave_nothing(
    server_url: str, bus: Client, server: Server, keys: Keys
):
    await join_deployment(server, keys)
    for i in range(100):
        writer = Writer(server, keys, f"r{i}")
        await writer.start()
        await writer.complete()
    tasks = asyncio.all_tasks()
    before = await ids(server)
    async with Client(server_url, prefix=keys.prefix, partitions=4) as other:
        found = await asyncio.gather(*(all_of(other.follow(f"r{i % 100}")) for i in range(10_000)))
        assert len(await ids(server) - before) <= READS + 1
    assert {len(events) for events in found} == {2}
    await eventually(lambda: asyncio.all_tasks() <= tasks)  # one of those before may have ended meanwhile
    await eventually(lambda: _none_since(server, before))


async def test_a_reader_that_leaves_early_can_take_the_run_up_again(bus: Client, writer: Writer):
    await writer.start()
    await writer.say("a", "b")
    async with aclosing(bus.follow("r")) as events:
        async for event in events:
            if isinstance(event, Chunk):
                break
    await writer.complete()
    assert await all_of(bus.follow("r", after=1)) == writer.events[2:]


async def test_a_follower_outlasts_a_server_that_restarts(tmp_path: Path):
    with EmbeddedServer(tmp_path, appendonly=True) as process:
        async with Server(process.url) as server, Client(process.url, prefix="restart", reconnect_s=20) as bus:
            writer = Writer(server, Keys("restart", 8), "r")
            await writer.start()
            seen: list[PublicEvent] = []
            task = asyncio.create_task(collect(bus.follow("r"), seen))
            await eventually(lambda: seen)
            await asyncio.to_thread(process.stop)
            await asyncio.to_thread(process.start)
            await writer.say("after")
            await eventually(lambda: seen == writer.events)
            await writer.complete()
            await task


async def test_a_long_outage_of_the_server_raises_an_error():
    with EmbeddedServer() as process:
        async with Server(process.url) as server, Client(process.url, prefix="away", reconnect_s=2) as bus:
            writer = Writer(server, Keys("away", 8), "r")
            await writer.start()
            seen: list[PublicEvent] = []
            task = asyncio.create_task(collect(bus.follow("r"), seen))
            await eventually(lambda: seen)
            await asyncio.to_thread(process.stop)
            with pytest.raises(ServerUnavailable):
                await task


async def test_an_iterator_used_after_its_clients_close_raises_an_error(server_url: str, keys: Keys, writer: Writer):
    await writer.start()
    async with Client(server_url, prefix=keys.prefix, partitions=4) as bus:
        events = bus.follow("r")
        assert await anext(events) == writer.events[0]
    with pytest.raises(RuntimeError, match="the client is closed"):
        await anext(events)


async def test_elements_of_an_answer_come_while_it_is_written_and_after_any_of_them(
    bus: Client, writer: Writer
) -> None:
    run = Run("r", bus)
    await writer.start()
    await writer.say('[{"a": 1}, {"a"')
    live = run.elements("*.a", int)
    assert (await anext(live)).value == 1
    await writer.say(": 2}, ", '{"a": 3}]')
    assert [(await anext(live)).value for _ in range(2)] == [2, 3]
    await writer.complete()
    assert [element async for element in live] == []
    assert [element.value async for element in run.elements("*.a", after=0)] == [2, 3]
    assert [element.path async for element in run.elements("*.a", after=1)] == [(2, "a")]


async def test_elements_of_a_run_that_fails_or_is_no_json_end_with_an_error(
    bus: Client, server: Server, keys: Keys, writer: Writer
) -> None:
    await writer.start()
    await writer.say("[1, 2")
    error = ErrorInfo(code="server_error", kind="server", message="")
    await writer.write((RunFailedEvent, {"finish": "error", "timing": Timing(total_ms=1), "error": error}))
    got: list[object] = []
    with pytest.raises(RunFailed):
        got += [element.value async for element in Run("r", bus).elements()]
    other = Writer(server, keys, "s")
    await other.start()
    await other.block("Here you are: [1]")
    await other.complete()
    with pytest.raises(Malformed):
        got += [element.value async for element in Run("s", bus).elements()]


async def test_a_client_with_another_prefix_than_the_deployments_is_told_that_nobody_listens_there(
    server_url: str, server: Server, keys: Keys, caplog: pytest.LogCaptureFixture
):
    await join_deployment(server, keys)
    async with Client(server_url, prefix=keys.prefix) as bus:
        with pytest.raises(RunNotFound, match="never accepted"):
            await anext(bus.follow("r", wait_s=0))
        assert not caplog.records
    async with Client(server_url, prefix=f"{keys.prefix}x") as bus:
        assert f"no deployment has begun with the prefix '{keys.prefix}x'" in caplog.text
        with pytest.raises(RunNotFound, match="nobody takes its requests") as caught:
            await anext(bus.follow("r", wait_s=0))
        assert caught.value.unheard == f"{keys.prefix}x"

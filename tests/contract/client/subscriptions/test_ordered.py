"""Subscriptions without a group: every event of a topic once, in order per run, from now or a cursor on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import BlockComplete, BlockStarted, Chunk, Client, Completed, Cursor, PublicEvent, Started
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus.client.subscriptions.ordered import OrderedSubscription
from tokenbus.errors import CursorAhead, CursorTrimmed, DeploymentMismatch, ServerUnavailable
from tokenbus_services.process.embedded_server import EmbeddedServer


async def take(subscription: OrderedSubscription[Chunk], count: int) -> list[Chunk]:
    return [await anext(subscription) for _ in range(count)]


def chunks(writer: Writer) -> list[PublicEvent]:
    return [event for event in writer.events if isinstance(event, Chunk)]


async def test_a_subscription_begins_where_the_topic_ends_when_it_is_entered(bus: Client, writer: Writer):
    await writer.say("before")
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("after", "that")
        assert [e.text for e in await take(events, 2)] == ["after", "that"]


async def test_each_run_comes_in_order_and_whole_though_runs_are_mixed(bus: Client, server: Server, keys: Keys):
    writers = [Writer(server, keys, f"r{i}") for i in range(12)]
    async with bus.subscribe("visible", kinds=Chunk) as events:
        for _ in range(20):
            await asyncio.gather(*(w.say("a", "b") for w in writers))
        seen: defaultdict[str, list[PublicEvent]] = defaultdict(list)
        for event in await take(events, 12 * 40):
            seen[event.run].append(event)
    assert len({keys.partition_of(w.run) for w in writers}) == 4
    assert seen == {w.run: w.events for w in writers}


async def test_each_topic_gives_its_own_kinds(bus: Client, writer: Writer):
    async with (
        bus.subscribe("visible", kinds=Chunk) as visible,
        bus.subscribe("chunks", kinds=Chunk) as every,
        bus.subscribe("blocks") as blocks,
        bus.subscribe("runs") as runs,
    ):
        await writer.start()
        await writer.block("Hello")
        await writer.complete()
        assert isinstance(await anext(visible), Chunk)
        assert isinstance(await anext(every), Chunk)
        assert isinstance(await anext(blocks), BlockStarted)
        assert isinstance(await anext(blocks), BlockComplete)
        assert isinstance(await anext(runs), Started)
        assert isinstance(await anext(runs), Completed)


async def test_every_place_is_a_cursor_to_resume_from(bus: Client, server: Server, keys: Keys):
    writers = [Writer(server, keys, f"r{i}") for i in range(6)]
    async with bus.subscribe("visible", kinds=Chunk) as events:
        cursors = [events.cursor]
        for writer in writers:
            await writer.say("a", "b", "c")
        seen: list[Chunk] = []
        for _ in range(18):
            seen += await take(events, 1)
            cursors.append(events.cursor)
    for done, cursor in enumerate(cursors):
        async with bus.subscribe("visible", kinds=Chunk, from_=Cursor.parse(str(cursor))) as resumed:
            rest = await take(resumed, 18 - done)
            assert resumed.cursor == cursors[-1]
        assert {(e.run, e.seq) for e in seen[:done]} | {(e.run, e.seq) for e in rest} == {(e.run, e.seq) for e in seen}


async def test_a_cursor_continues_from_stored_to_live_events(bus: Client, writer: Writer):
    async with bus.subscribe("visible", kinds=Chunk) as events:
        cursor = events.cursor
    await writer.say(*map(str, range(700)))
    async with bus.subscribe("visible", kinds=Chunk, from_=cursor) as events:
        seen = await take(events, 300)
        await writer.say(*map(str, range(300)))
        seen += await take(events, 700)
    assert seen == chunks(writer)


async def test_the_oldest_kept_is_a_place_to_begin(bus: Client, server: Server, keys: Keys):
    writer = Writer(server, keys, "r", topic_entries=5)
    await writer.say(*map(str, range(9)))
    async with bus.subscribe("visible", kinds=Chunk, from_="start") as events:
        assert await take(events, 5) == writer.events[4:]


async def test_a_trimmed_cursor_is_an_error_and_iterating_on_begins_at_the_oldest(
    bus: Client, server: Server, keys: Keys
):
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("first", "second")
        await take(events, 1)
        cursor = events.cursor
    await writer.say(*map(str, range(5)))
    async with bus.subscribe("visible", kinds=Chunk, from_=cursor) as events:
        with pytest.raises(CursorTrimmed) as caught:
            await anext(events)
        stream = keys.topic(keys.partition_of("r"), "visible")
        [(oldest, _), *_] = await server.client.xrange(stream, count=1)
        assert (caught.value.key, caught.value.oldest) == (stream, oldest.decode())
        assert caught.value.cursor in cursor.positions
        assert await take(events, 5) == writer.events[2:]


async def test_a_cursor_whose_own_entry_alone_is_trimmed_counts_as_trimmed(bus: Client, server: Server, keys: Keys):
    """No later event is lost, but the client cannot know that: a false error is better than an unseen gap."""
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("read")
        await take(events, 1)
        cursor = events.cursor
    await writer.say(*map(str, range(5)))
    async with bus.subscribe("visible", kinds=Chunk, from_=cursor) as events:
        with pytest.raises(CursorTrimmed):
            await anext(events)


async def test_a_cursor_taken_on_an_empty_topic_notices_trimming_too(bus: Client, server: Server, keys: Keys):
    if not (await server.check()).entries_read:
        pytest.skip("Redis 6.2 does not count what it trimmed")
    async with bus.subscribe("visible", kinds=Chunk) as events:
        cursor = events.cursor
    writer = Writer(server, keys, "r", topic_entries=5)
    await writer.say(*map(str, range(6)))
    async with bus.subscribe("visible", kinds=Chunk, from_=cursor) as events:
        with pytest.raises(CursorTrimmed):
            await anext(events)


async def test_a_reader_that_falls_behind_the_retention_is_notified(bus: Client, server: Server, keys: Keys):
    writer = Writer(server, keys, "r", topic_entries=600)
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("first")
        assert await take(events, 1) == writer.events
        for _ in range(7):
            await writer.say(*map(str, range(100)))
        with pytest.raises(CursorTrimmed):
            await anext(events)
        assert await take(events, 600) == writer.events[-600:]


async def test_a_killed_connection_costs_no_event_and_repeats_none(bus: Client, server: Server, writer: Writer):
    async with bus.subscribe("visible", kinds=Chunk) as events:
        seen: list[Chunk] = []
        for i in range(5):
            task = asyncio.create_task(take(events, 2))
            await eventually(lambda: _waits(server))
            for client in await server.client.client_list():
                if client["cmd"] == "xread":
                    await server.client.client_kill_filter(_id=client["id"])
            await writer.say(str(i), str(i))
            seen += await task
    assert seen == writer.events


async def _waits(server: Server) -> bool:
    clients: list[dict[str, str]] = await server.client.client_list()
    return any(c["cmd"] == "xread" and "b" in c["flags"] for c in clients)


async def test_a_long_outage_raises_an_error_and_the_next_iteration_retries():
    with EmbeddedServer() as process:
        async with (
            Server(process.url) as server,
            Client(process.url, prefix="away", reconnect_s=2) as bus,
            bus.subscribe("visible", kinds=Chunk) as events,
        ):
            await asyncio.to_thread(process.stop)
            with pytest.raises(ServerUnavailable):
                await anext(events)
            await asyncio.to_thread(process.start)
            writer = Writer(server, Keys("away"), "r")
            await writer.say("a")
            assert await take(events, 1) == writer.events


async def test_closing_ends_the_iteration_and_gives_the_connection_back(bus: Client, server: Server, keys: Keys):
    async with bus.subscribe("visible", kinds=Chunk) as events:
        task = asyncio.create_task(take(events, 1))
        await eventually(lambda: _waits(server))
        await events.aclose()
        with pytest.raises(StopAsyncIteration):
            await task
    await eventually(lambda: _none_waits(server))


async def _none_waits(server: Server) -> bool:
    return not await _waits(server)


async def test_closing_the_client_ends_its_subscriptions(server_url: str, server: Server, keys: Keys):
    async with Client(server_url, prefix=keys.prefix) as bus:
        events = bus.subscribe("visible", kinds=Chunk)
        task = asyncio.create_task(take(events, 1))
        await eventually(lambda: _waits(server))
    with pytest.raises(StopAsyncIteration):
        await task


async def test_cancelling_a_waiting_reader_loses_nothing(bus: Client, server: Server, writer: Writer):
    async with bus.subscribe("visible", kinds=Chunk) as events:
        for i in range(5):
            task = asyncio.create_task(take(events, 1))
            await eventually(lambda: _waits(server))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await writer.say(str(i), str(i))
            assert await take(events, 2) == writer.events[-2:]


async def test_an_entry_that_is_no_event_is_logged_and_passed_over(
    bus: Client, server: Server, keys: Keys, caplog: pytest.LogCaptureFixture, writer: Writer
):
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await server.client.xadd(keys.topic(keys.partition_of("r"), "visible"), {"x": "y"})
        await writer.say("good")
        assert await take(events, 1) == writer.events
        assert events.gaps.malformed == 1
    assert "entry passed over (1 so far): visible" in caplog.text


async def test_a_cursor_taken_after_a_gap_is_past_the_gap(bus: Client, server: Server, keys: Keys):
    writer = Writer(server, keys, "r", topic_entries=5)
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("first")
        await take(events, 1)
        old = events.cursor
    await writer.say(*map(str, range(9)))
    async with bus.subscribe("visible", kinds=Chunk, from_=old) as events:
        with pytest.raises(CursorTrimmed):
            await anext(events)
        cursor = events.cursor
    gaps: list[CursorTrimmed] = []
    async with bus.subscribe("visible", kinds=Chunk, from_=cursor, on_trimmed=gaps.append) as events:
        assert await take(events, 5) == writer.events[-5:]


async def test_a_cursor_past_the_newest_entry_raises_an_error(bus: Client, server: Server, keys: Keys, writer: Writer):
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("a")
        await take(events, 1)
        cursor = events.cursor
    partition = keys.partition_of("r")
    ahead = [f"{2**60}-0" if p == partition else at for p, at in enumerate(cursor.positions)]
    with pytest.raises(CursorAhead) as caught:
        await anext(bus.subscribe("visible", kinds=Chunk, from_=Cursor("visible", tuple(ahead))))
    assert (caught.value.key, caught.value.cursor) == (keys.topic(partition, "visible"), f"{2**60}-0")
    await server.client.delete(keys.topic(partition, "visible"))
    with pytest.raises(CursorAhead, match="0-0"):
        await anext(bus.subscribe("visible", kinds=Chunk, from_=cursor))


def test_a_name_that_there_is_not_is_refused_with_the_nearest(bus: Client):
    wrong: Any = bus
    with pytest.raises(ValueError, match="topic: unknown 'visable': did you mean 'visible'"):
        wrong.subscribe("visable")
    with pytest.raises(ValueError, match="ack: unknown 'explict': did you mean 'explicit'"):
        wrong.subscribe("visible", ack="explict")
    with pytest.raises(ValueError, match="from_: unknown 'beginning'"):
        wrong.subscribe("visible", from_="beginning")
    with pytest.raises(ValueError, match="not entry ids"):
        wrong.subscribe("visible", from_=Cursor("visible", ("1-0", "x", "$", "0-0")))


async def test_a_subscription_with_a_wrong_number_of_partitions_raises_an_error(
    server_url: str, server: Server, keys: Keys
):
    async with Client(server_url, prefix=keys.prefix) as bus, bus.subscribe("visible", kinds=Chunk) as events:
        await join_deployment(server, keys)
        with pytest.raises(DeploymentMismatch, match="partitions is 8 here but 4"):
            await anext(events)


async def test_a_cursor_of_another_number_of_partitions_is_refused(bus: Client):
    with pytest.raises(DeploymentMismatch):
        async with bus.subscribe("visible", kinds=Chunk, from_=Cursor("visible", ("0-0",))):
            pass


async def test_a_cursor_of_another_topic_or_together_with_a_group_is_refused(bus: Client):
    cursor = Cursor("visible", ("0-0",) * 4)
    with pytest.raises(ValueError, match="another topic"):
        bus.subscribe("blocks", from_=cursor)
    with pytest.raises(ValueError, match="a group keeps its own"):
        bus.subscribe("visible", kinds=Chunk, group="tts", from_=cursor)  # type: ignore[call-overload]

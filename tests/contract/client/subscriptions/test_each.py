"""Subscriptions with filters, explicit acknowledgement, bounds and handlers; what leaving one leaves behind."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

GROUPS = [None, "tts"]


def subscription(bus: Client, group: str | None, **how: Any) -> Any:
    return bus.subscribe("visible", kinds=Chunk, from_="start", **({"group": group} if group else {}), **how)


@pytest.mark.parametrize("group", GROUPS)
async def test_only_the_wanted_runs_and_kinds_come(bus: Client, server: Server, keys: Keys, group: str | None):
    for run in ("a", "b", "c"):
        writer = Writer(server, keys, run)
        await writer.block("Hello")
    how: dict[str, Any] = {"group": group} if group else {}
    async with bus.subscribe("blocks", from_="start", kinds=["block_complete"], runs={"b"}, **how) as events:
        event = await anext(events)
        assert (event.run, event.content) == ("b", "Hello")
        more = Writer(server, keys, "b")
        more.log += ":2"
        await more.block("again")
        assert (await anext(events)).content == "again"


@pytest.mark.parametrize("group", GROUPS)
async def test_handlers_run_side_by_side_but_those_of_one_run_in_order(
    bus: Client, server: Server, keys: Keys, group: str | None
):
    writers = [Writer(server, keys, f"r{i}") for i in range(6)]
    for writer in writers:
        await writer.say("a", "b", "c")
    seen: defaultdict[str, list[Chunk]] = defaultdict(list)
    together: set[str] = set()
    met = asyncio.Event()

    async def handle(event: Chunk) -> None:
        together.add(event.run)
        if len(together) == 3:
            met.set()
        await met.wait()  # three runs at once, or this never ends
        assert len(together) <= 3
        seen[event.run].append(event)
        together.discard(event.run)
        if sum(map(len, seen.values())) == 18:
            await made.aclose()

    made = subscription(bus, group)
    await made.each(handle, concurrency=3)
    assert seen == {w.run: w.events for w in writers}


@pytest.mark.parametrize("group", GROUPS)
async def test_an_error_of_a_handler_is_raised_and_its_event_comes_again(
    bus: Client, group: str | None, writer: Writer
):
    await writer.say("a", "b", "c")

    async def fail_at_b(event: Chunk) -> None:
        if event.text == "b":
            raise ZeroDivisionError

    made = subscription(bus, group)
    with pytest.raises(ZeroDivisionError):
        await made.each(fail_at_b, concurrency=4)
    again: Any = subscription(bus, group) if group else bus.subscribe("visible", kinds=Chunk, from_=made.cursor)
    async with again as events:
        assert (await anext(events)).text == "b"
    await made.aclose()


async def test_events_may_be_acknowledged_in_any_order_and_the_open_ones_come_again(bus: Client, writer: Writer):
    await writer.say("a", "b", "c")
    async with bus.subscribe("visible", kinds=Chunk, group="tts", from_="start", ack="explicit") as events:
        a, b, c = [await anext(events) for _ in range(3)]
        events.ack(c)
        events.ack(a)
        events.ack(a)
    async with bus.subscribe("visible", kinds=Chunk, group="tts", ack="explicit") as events:
        assert await anext(events) == b
        assert await anext(events) == c  # an offset has no holes: at least once


async def test_at_most_the_prefetch_is_delivered_unacknowledged(bus: Client, writer: Writer):
    await writer.say(*map(str, range(9)))
    async with bus.subscribe("visible", kinds=Chunk, group="tts", from_="start", ack="explicit", prefetch=2) as events:
        first = await anext(events)
        await anext(events)
        third = asyncio.ensure_future(anext(events))
        done, _ = await asyncio.wait({third}, timeout=0.05)
        assert not done
        events.ack(first)
        assert (await third).text == "2"


async def test_a_loop_that_is_left_closes_the_subscription(bus: Client, writer: Writer):
    await writer.say("a", "b")
    tasks = asyncio.all_tasks()
    for group in GROUPS:
        made = subscription(bus, group)
        async for event in made:
            assert event.text == "a"
            break
        await eventually(lambda made=made: made._closed and asyncio.all_tasks() == tasks)
        assert [e async for e in made] == []


async def lag(server: Server, keys: Keys, run: str, group: str) -> Any:
    stream = keys.topic(keys.partition_of(run), "visible")
    [shown] = [g for g in await server.client.xinfo_groups(stream) if g["name"] == f"visible:{group}".encode()]
    return shown["lag"]


@pytest.mark.parametrize("begin", ["now", "start"])
async def test_ordinary_tools_see_the_lag_of_a_group(bus: Client, server: Server, keys: Keys, begin: Any):
    if not (await server.check()).entries_read:
        pytest.skip("Redis 6.2 shows no lag")
    writer = Writer(server, keys, "r", topic_entries=20)
    await writer.say(*map(str, range(50)))  # 20 are kept, of which a group that begins now has none to read
    behind = 20 if begin == "start" else 0
    async with bus.subscribe("visible", kinds=Chunk, group="g", from_=begin) as events:
        await writer.say("new")
        kept = min(behind + 1, 20)
        assert await anext(events)
        for _ in range(kept - 1):
            await anext(events)
        assert 0 <= await lag(server, keys, "r", "g") <= kept, "reported at intervals"
    assert await lag(server, keys, "r", "g") == 0
    await writer.say("a", "b", "c")
    assert await lag(server, keys, "r", "g") == 3


async def test_what_cannot_be_is_refused(bus: Client):
    with pytest.raises(ValueError, match="prefetch"):
        bus.subscribe("visible", kinds=Chunk, prefetch=0)
    with pytest.raises(ValueError, match="from_"):
        bus.subscribe("visible", kinds=Chunk, from_="oldest")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="concurrency"):
        await bus.subscribe("visible", kinds=Chunk).each(_nothing, concurrency=0)


async def _nothing(event: Chunk) -> None: ...

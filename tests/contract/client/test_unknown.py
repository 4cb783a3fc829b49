"""A client that is older than its server: events that it does not know come as such, and nothing breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client, Completed, PublicEvent, Response, UnknownEvent, coalesced
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import Malformed
from tokenbus.sync import Client as SyncClient

ONE, TWO = "This is the first sentence of it. ", "And that is the second one."


async def say_new(server: Server, keys: Keys, writer: Writer, *topics: Any, **changes: Any) -> dict[str, object]:
    """The run says something that only a newer tokenbus knows: to its log, and to these topics."""
    fields = {"type": "applause", "run": writer.run, "seq": len(writer.events), "turn": 0, "attempt": 1, "loud": [1]}
    fields |= changes
    about = {"event_type": fields["type"], "fields": fields}
    unknown = UnknownEvent(run=writer.run, seq=len(writer.events), turn=0, attempt=1, **about)
    writer.events.append(unknown)
    data = {"__data__": msgspec.json.encode(fields)}
    await server.client.xadd(writer.log, data, id=f"1-{unknown.seq}")
    for topic in topics:
        await server.client.xadd(keys.topic(keys.partition_of(writer.run), topic), data)
    return fields


async def story(server: Server, keys: Keys) -> Writer:
    """A run with a new event in its text, and a chunk of a new kind of block."""
    writer = Writer(server, keys, "r")
    await writer.start()
    await writer.say(ONE)
    await say_new(server, keys, writer, "visible", "chunks", "runs")
    chunk = {"block": 0, "kind": "smell", "text": "x", "visible": True, "depth": 0}
    await say_new(server, keys, writer, "visible", "chunks", type="chunk", **chunk)
    await writer.say(TWO)
    await writer.complete()
    return writer


async def test_a_follower_gets_every_seq(bus: Client, server: Server, keys: Keys) -> None:
    writer = await story(server, keys)
    received = [event async for event in bus.follow("r")]
    assert received == writer.events
    assert [event.seq for event in received] == list(range(6))
    assert [event.fields["loud"] for event in received if isinstance(event, UnknownEvent)] == [[1], [1]]
    assert [event async for event in bus.follow("r", after=2)] == writer.events[3:]


async def test_what_a_run_gave_is_folded_without_it(bus: Client, server: Server, keys: Keys) -> None:
    await story(server, keys)
    response = await bus.result("r")
    assert (response.text, response.status, response.events) == (ONE + TWO, "completed", 6)
    assert response == Response.of([event async for event in bus.follow("r")])


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_subscriber_gets_it_unless_it_named_kinds(
    bus: Client, server: Server, keys: Keys, group: str | None
) -> None:
    writer = await story(server, keys)
    how: Any = {"from_": "start", "group": group}
    async with bus.subscribe("visible", **how) as events:
        assert [await anext(events) for _ in range(4)] == writer.events[1:5]
    how["group"] = group and f"{group}2"
    async with bus.subscribe("visible", kinds=["text"], **how) as events:
        assert [await anext(events) for _ in range(2)] == [writer.events[1], writer.events[4]]


async def test_screens_get_it_in_its_place(bus: Client, server: Server, keys: Keys) -> None:
    writer = await story(server, keys)
    shown: list[PublicEvent] = [event async for event in coalesced(bus.follow("r"), hold_s=60)]
    assert shown == writer.events


async def test_a_sentence_subscription_skips_it(bus: Client, server: Server, keys: Keys) -> None:
    writer = await story(server, keys)
    async with bus.sentences(from_="start") as sentences:
        read = [await anext(sentences) for _ in range(2)]
    assert [(s.text, s.first, s.last) for s in read] == [(ONE, 1, 1), (TWO, 4, 4)]
    assert isinstance(writer.events[4], Chunk)


async def test_scripts_receive_it(server_url: str, bus: Client, server: Server, keys: Keys) -> None:
    writer = await story(server, keys)

    def script() -> list[PublicEvent]:
        with SyncClient(server_url, prefix=keys.prefix, partitions=keys.partitions) as sync:
            return list(sync.follow("r"))

    assert await asyncio.to_thread(script) == writer.events


async def test_a_live_follower_continues_after_it(bus: Client, server: Server, keys: Keys, writer: Writer) -> None:
    await writer.start()
    received: list[PublicEvent] = []

    async def follow() -> None:
        received.extend([event async for event in bus.follow("r")])

    following = asyncio.create_task(follow())
    await say_new(server, keys, writer)
    await writer.complete()
    await eventually(following.done)
    assert received == writer.events
    assert isinstance(received[-1], Completed)


@pytest.mark.parametrize("live", [False, True])
async def test_an_end_of_a_new_kind_is_an_end_and_no_success(
    bus: Client, server: Server, keys: Keys, live: bool, writer: Writer
) -> None:
    await writer.start()
    result_task = asyncio.create_task(bus.result("r")) if live else None
    await say_new(server, keys, writer, type="completed", finish="applause", timing={"total_ms": 1})
    with pytest.raises(Malformed, match="ended in a way"):
        await (result_task or bus.result("r"))
    assert [event async for event in bus.follow("r")] == writer.events


@pytest.mark.parametrize(
    "data", [b'{"type":"applause","run":"r","seq":1}', b'{"run":"r","seq":1,"turn":0,"attempt":1}', b"[1]", b"applause"]
)
async def test_bytes_that_are_not_an_event_are_reported(
    bus: Client, server: Server, data: bytes, writer: Writer
) -> None:
    await writer.start()
    await server.client.xadd(writer.log, {"__data__": data}, id="1-1")
    with pytest.raises(Malformed, match="log:r 1-1"):
        [event async for event in bus.follow("r")]

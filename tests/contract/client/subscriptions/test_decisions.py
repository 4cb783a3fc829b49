"""The topic `decisions`, for those who keep watch: subscribed to like any other."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.waiting import eventually
from tokenbus import Client, Cursor, Decided, UnknownEvent
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.decisions import encode
from tokenbus.sync import Client as SyncClient


async def decide(server: Server, keys: Keys, run: str, count: int) -> list[Decided]:
    """Publish this many decisions of a run as the parser does."""
    decisions = [
        Decided(run=run, n=n, turn=0, attempt=1, policy="guard", action="block", tool_name="shell", original="{}")
        for n in range(count)
    ]
    stream = keys.topic(keys.partition_of(run), "decisions")
    for decided in decisions:
        await server.client.xadd(stream, {"__data__": encode(decided)})
    return decisions


async def take(events: Any, count: int) -> list[Any]:
    return [await anext(events) for _ in range(count)]


def of(run: str, events: list[Decided]) -> list[Decided]:
    return [event for event in events if event.run == run]


async def test_every_decision_comes_once_and_those_of_a_run_in_order(bus: Client, server: Server, keys: Keys) -> None:
    decisions_published = {run: await decide(server, keys, run, 3) for run in ("a", "b")}
    async with bus.subscribe("decisions", from_="start") as decisions:
        received = await take(decisions, 6)
        cursor = Cursor.parse(str(decisions.cursor))
    assert {run: of(run, received) for run in decisions_published} == decisions_published
    more = await decide(server, keys, "c", 1)
    async with bus.subscribe("decisions", from_=cursor) as decisions:
        assert await take(decisions, 1) == more


async def test_decisions_of_wanted_runs_alone(bus: Client, server: Server, keys: Keys) -> None:
    await decide(server, keys, "a", 2)
    wanted = await decide(server, keys, "b", 2)
    async with bus.subscribe("decisions", from_="start", runs={"b"}) as decisions:
        assert await take(decisions, 2) == wanted


async def test_a_group_has_each_decision_done_once(bus: Client, server: Server, keys: Keys) -> None:
    decisions_published = await decide(server, keys, "a", 2)
    async with bus.subscribe("decisions", group="audit", from_="start", ack="explicit") as decisions:
        received = await take(decisions, 2)
        assert received == decisions_published
        decisions.ack(received[0])
    async with bus.subscribe("decisions", group="audit") as decisions:
        assert await take(decisions, 1) == decisions_published[1:]


async def test_each_hands_decisions_to_a_handler(bus: Client, server: Server, keys: Keys) -> None:
    decisions_published, published = await decide(server, keys, "a", 3), list[Decided]()

    async def note(decided: Decided) -> None:
        published.append(decided)

    subscription = bus.subscribe("decisions", kinds=Decided, from_="start")
    task = asyncio.create_task(subscription.each(note))
    await eventually(lambda: published == decisions_published)
    await subscription.aclose()
    await task


async def test_scripts_subscribe_to_decisions(bus: Client, server_url: str, server: Server, keys: Keys) -> None:
    decisions_published = await decide(server, keys, "a", 2)

    def script() -> list[Any]:
        with (
            SyncClient(server_url, prefix=keys.prefix, partitions=keys.partitions) as sync,
            sync.subscribe("decisions", from_="start") as decisions,
        ):
            return [next(decisions) for _ in range(2)]

    assert await asyncio.to_thread(script) == decisions_published


async def test_a_decision_of_a_newer_tokenbus_is_unknown_and_other_bytes_are_passed_over(
    bus: Client, server: Server, keys: Keys
) -> None:
    stream = keys.topic(keys.partition_of("a"), "decisions")
    new = {"type": "decision", "run": "a", "n": 0, "turn": 0, "attempt": 1, "policy": "guard", "action": "pardon"}
    for data in (json.dumps(new), "{}"):
        await server.client.xadd(stream, {"__data__": data})
    decisions_published = await decide(server, keys, "a", 1)
    async with bus.subscribe("decisions", from_="start", runs={"a"}) as decisions:
        unknown = await anext(decisions)
        assert isinstance(unknown, UnknownEvent)
        assert (unknown.seq, unknown.fields) == (0, new)
        assert await take(decisions, 1) == decisions_published
        assert decisions.gaps.malformed == 1


def test_decisions_are_of_one_kind(bus: Client) -> None:
    wrong: Any = ["block"]
    with pytest.raises(ValueError, match="kinds of decisions: unknown 'block'"):
        bus.subscribe("decisions", kinds=wrong)

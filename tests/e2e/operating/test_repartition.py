"""`tokenbus repartition` on a fleet at work: runs that were open go on, new ones take the new number, all are found."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import WITH_TOOLS, fleet
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus import repartition
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment, learn
from tokenbus.bus.server.server import Server
from tokenbus.client.decode import TopicEvent
from tokenbus.errors import RepartitionRefused
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, ToolCall, Turn

WORDS = " ".join(f"word{n}" for n in range(60))
EACH = 6


async def change(server: Server, keys: Keys, number: int) -> None:
    """What `tokenbus repartition NUMBER` does."""
    await repartition.announce(server, keys, await repartition.layout(server, keys), number)
    now = await repartition.layout(server, keys)

    async def ready() -> bool:
        return not await repartition.lagging(server, keys, now)

    await eventually(ready, timeout=60)
    await repartition.place(server, keys, now)


async def test_runs_before_during_and_after_a_change_end_as_if_nothing_had_been(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    call = ToolCall(name="weather", arguments={"city": "Oslo"})
    script = Script(
        name="story",
        turns=(
            Turn(says=Reply(text=WORDS, tool_calls=(call,)), delivery=Delivery(pace=60)),
            Turn(says=Reply(text=WORDS), delivery=Delivery(pace=120)),
        ),
    )
    runs: list[str] = []
    seen: dict[str, list[int]] = {}
    shared: Counter[tuple[str, int]] = Counter()

    async def note(event: TopicEvent) -> None:
        seen.setdefault(event.run, []).append(event.seq)

    async def note_shared(event: TopicEvent) -> None:
        shared[(event.run, event.seq)] += 1

    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS) as running,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        alone, group = bus.subscribe("blocks"), bus.subscribe("blocks", group="app")
        async with alone, group:
            reading = [asyncio.create_task(alone.each(note)), asyncio.create_task(group.each(note_shared))]

            async def publish() -> None:
                for _ in range(EACH):
                    run = await send("story", tools=[WEATHER])
                    runs.append(run)

            for number in (7, 3):  # neither divides the other
                await publish()
                _, _ = await asyncio.gather(change(server, keys, number), publish())
                if number == 3:
                    parser = running.worker_of("parser")
                    if parser.runs("fetcher"):
                        await parser.stop()  # if it were killed, its provider calls would be lost
                    else:
                        parser.kill()
                    await running.start(parser.kind)  # this one starts with the old number in its settings
            epoch = str((await repartition.layout(server, keys)).epoch).encode()

            async def fenced() -> bool:
                return await server.client.hget(keys.lease(0, "parser"), "epoch") == epoch

            await eventually(fenced, timeout=60)  # from here on no run is placed by an earlier number
            await publish()
            results = await asyncio.gather(*(bus.result(run) for run in runs))
            now = await repartition.layout(server, keys)
            assert (now.placing, now.spread) == (3, 7)
            assert await repartition.runs_elsewhere(server, keys, now) > 0
            told = lambda: set(seen) == set(runs) == {run for run, _ in shared}  # noqa: E731
            await eventually(told, timeout=60)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

        assert [result.status for result in results] == ["completed"] * len(runs)
        assert all(seqs == sorted(set(seqs)) for seqs in seen.values()), "in order, none twice"
        async with Client(server_url, prefix=keys.prefix, partitions=keys.partitions) as follower:  # the old number
            for run in runs:
                judge.check([msgspec.to_builtins(event) async for event in follower.follow(run)])
        there: list[Any] = [key async for key in server.client.scan_iter(match=f"{keys.prefix}:*:run:*")]
        placed = {run: int(place.partition("{")[2]) for place, run in (key.decode().split("}:run:") for key in there)}
        names = Counter(key.decode().partition(":run:")[2] for key in there)
        assert names == Counter(runs), "no run is in two partitions"
        assert all(placed[run] == crc32(run.encode()) % 3 for run in runs[-EACH:])
        assert await running.doctor()


async def test_a_worker_that_does_not_say_that_it_serves_both_stops_the_change(server: Server, keys: Keys) -> None:
    await join_deployment(server, keys)
    await server.client.zadd(keys.members("parser"), {"old-release": server.clock.now_ms()})
    await repartition.announce(server, keys, await repartition.layout(server, keys), 8)
    now = await repartition.layout(server, keys)
    assert await repartition.lagging(server, keys, now) == ["old-release"]
    with pytest.raises(RepartitionRefused, match="under way"):
        await repartition.announce(server, keys, now, 5)
    await repartition.give_up(server, keys, now)
    now = await repartition.layout(server, keys)
    assert (now.placing, now.announced) == (keys.partitions, None)
    await learn(server, keys)
    assert keys.partition_of("r") == crc32(b"r") % 4

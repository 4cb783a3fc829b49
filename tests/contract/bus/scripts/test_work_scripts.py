"""The scripts of the work queues: only who has an entry can keep it, finish it or hand it back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.bus.state import everything
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.work_queue import BEGUN, HANDED_BACK_MS
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

GROUP = "g"

pytestmark = pytest.mark.leaves_pending


class Scene:
    """One queue and its group."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.client = server.client
        self.stream = keys.topic(0, "turns")

    async def put(self, number: int) -> list[str]:
        return [(await self.client.xadd(self.stream, {"n": str(i)})).decode() for i in range(number)]

    async def read(self, consumer: str, count: int) -> list[str]:
        found = await self.client.xreadgroup(GROUP, consumer, {self.stream: ">"}, count=count)
        return [entry_id.decode() for _, entries in found for entry_id, _ in entries]

    async def claim(self, consumer: str, idle_ms: int = 0, start: str = "0-0", count: int = 10) -> list[Any]:
        call = scripts.claim(self.stream, group=GROUP, consumer=consumer, idle_ms=idle_ms, start=start, count=count)
        cursor, entries = await run_script(self.server, call)
        return [cursor.decode(), [(entry_id.decode(), deliveries) for entry_id, deliveries, _ in entries]]

    async def finish(self, consumer: str, *ids: str) -> int:
        return await run_script(self.server, scripts.finish(self.stream, group=GROUP, consumer=consumer, ids=ids))

    async def heartbeat(self, consumer: str, *ids: str) -> list[str]:
        call = scripts.heartbeat(self.stream, group=GROUP, consumer=consumer, ids=ids)
        return [entry_id.decode() for entry_id in await run_script(self.server, call)]

    async def hand_back(self, consumer: str, *ids: str) -> int:
        return await run_script(self.server, scripts.hand_back(self.stream, group=GROUP, consumer=consumer, ids=ids))

    async def mark(self, consumer: str, entry: str, *, begun: bool) -> int:
        return await run_script(
            self.server, scripts.mark(self.stream, group=GROUP, consumer=consumer, entry=entry, begun=begun)
        )

    async def retire(self, consumer: str) -> int:
        return await run_script(self.server, scripts.retire(self.stream, group=GROUP, consumer=consumer))

    async def pending(self) -> dict[str, tuple[str, int, int]]:
        """Entry -> consumer, idle time, deliveries."""
        found = await self.client.xpending_range(self.stream, GROUP, "-", "+", 100)
        return {
            p["message_id"].decode(): (p["consumer"].decode(), p["time_since_delivered"], p["times_delivered"])
            for p in found
        }

    async def consumers(self) -> set[bytes]:
        return {c["name"] for c in await self.client.xinfo_consumers(self.stream, GROUP)}


@pytest.fixture
async def scene(server: Server, keys: Keys) -> Scene:
    scene = Scene(server, keys)
    await server.client.xgroup_create(scene.stream, GROUP, id="0-0", mkstream=True)
    return scene


async def test_a_heartbeat_sets_the_idle_time_back_and_counts_no_delivery(scene: Scene):
    await scene.put(1)
    [mine] = await scene.read("a", 1)
    await scene.client.xclaim(scene.stream, GROUP, "a", 0, [mine], idle=3_600_000, justid=True)
    assert await scene.heartbeat("a", mine) == []
    consumer, idle_ms, deliveries = (await scene.pending())[mine]
    assert (consumer, deliveries) == ("a", 1)
    assert idle_ms < 3_600_000


async def test_a_zombies_heartbeat_reclaims_nothing_and_returns_what_it_lost(scene: Scene):
    await scene.put(3)
    taken, kept, finished = await scene.read("a", 3)
    await scene.client.xclaim(scene.stream, GROUP, "b", 0, [taken])
    await scene.finish("a", finished)
    assert await scene.heartbeat("a", taken, kept, finished) == [taken, finished]
    assert (await scene.pending())[taken][0] == "b"


async def test_an_item_without_a_heartbeat_is_claimed_and_counts_as_delivered_again(scene: Scene):
    ids = await scene.put(2)
    await scene.read("a", 2)
    assert await scene.claim("b", idle_ms=60_000) == ["0-0", []]
    assert await scene.claim("b") == ["0-0", [(entry_id, 2) for entry_id in ids]]
    assert {consumer for consumer, _, _ in (await scene.pending()).values()} == {"b"}


async def test_a_claim_returns_at_most_the_requested_count_and_continues_where_it_stopped(scene: Scene):
    ids = await scene.put(5)
    await scene.read("a", 5)
    cursor, first = await scene.claim("b", count=2)
    assert [entry_id for entry_id, _ in first] == ids[:2]
    cursor, second = await scene.claim("b", start=cursor, count=2)
    assert [entry_id for entry_id, _ in second] == ids[2:4]


async def test_a_dead_workers_entry_is_found_behind_many_that_live(scene: Scene):
    await scene.put(300)
    *live, dead = await scene.read("a", 300)
    await scene.client.xclaim(scene.stream, GROUP, "a", 0, [dead], idle=60_000, justid=True)
    await scene.heartbeat("a", *live)
    assert (await scene.claim("b", idle_ms=30_000, count=1))[1] == [(dead, 2)]


async def test_a_finished_entry_is_gone(scene: Scene):
    await scene.put(2)
    first, second = await scene.read("a", 2)
    assert await scene.finish("a", first) == 1
    assert await scene.client.xlen(scene.stream) == 1
    assert set(await scene.pending()) == {second}
    assert await scene.finish("a", first) == 0


async def test_a_zombie_finishes_no_item_that_another_worker_owns(scene: Scene):
    await scene.put(1)
    [entry_id] = await scene.read("a", 1)
    await scene.claim("b")
    before = await everything(scene.server, scene.keys)
    assert await scene.finish("a", entry_id) == 0
    assert await everything(scene.server, scene.keys) == before


async def test_what_is_handed_back_keeps_its_id_and_is_as_new(scene: Scene):
    await scene.put(1)
    [entry_id] = await scene.read("a", 1)
    assert await scene.hand_back("a", entry_id) == 1
    assert await scene.claim("b", idle_ms=HANDED_BACK_MS) == ["0-0", [(entry_id, 1)]]


async def test_only_its_worker_hands_an_entry_back(scene: Scene):
    await scene.put(1)
    [entry_id] = await scene.read("a", 1)
    await scene.claim("b")
    before = await everything(scene.server, scene.keys)
    assert await scene.hand_back("a", entry_id) == 0
    assert await everything(scene.server, scene.keys) == before


async def test_what_has_not_begun_is_claimed_as_if_never_delivered_and_what_has_is_not(scene: Scene):
    ids = await scene.put(3)
    waiting, begun, _ = await scene.read("a", 3)
    for _ in range(2):  # a reply may be lost
        assert await scene.mark("a", waiting, begun=False) == 1
    assert await scene.mark("a", begun, begun=False) == 1
    assert await scene.heartbeat("a", *ids) == []
    assert await scene.mark("a", begun, begun=True) == 1
    assert (await scene.claim("b"))[1] == list(zip(ids, (1, BEGUN + 2, 2), strict=True))


async def test_a_zombie_does_not_begin_an_item_that_another_worker_owns(scene: Scene):
    await scene.put(2)
    taken, finished = await scene.read("a", 2)
    await scene.mark("a", taken, begun=False)
    await scene.claim("b")
    await scene.finish("b", finished)
    before = await everything(scene.server, scene.keys)
    assert [await scene.mark("a", entry, begun=True) for entry in (taken, finished)] == [0, 0]
    assert await everything(scene.server, scene.keys) == before


async def test_a_consumer_that_has_something_cannot_be_removed(scene: Scene):
    await scene.put(1)
    [entry_id] = await scene.read("a", 1)
    assert await scene.retire("a") == 0
    assert await scene.consumers() == {b"a"}
    await scene.hand_back("a", entry_id)
    assert await scene.retire("a") == 1
    assert await scene.consumers() == {b"-"}


async def test_a_missing_group_gives_no_items_and_no_error(scene: Scene):
    await scene.put(1)
    [entry_id] = await scene.read("a", 1)
    for gone in (lambda: scene.client.xgroup_destroy(scene.stream, GROUP), lambda: scene.client.delete(scene.stream)):
        await gone()
        assert await scene.heartbeat("a", entry_id) == [entry_id]
        assert await scene.finish("a", entry_id) == 0
        assert await scene.hand_back("a", entry_id) == 0
        assert await scene.mark("a", entry_id, begun=True) == 0
        assert await scene.retire("a") == 0

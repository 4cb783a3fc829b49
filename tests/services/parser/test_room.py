"""What a parser forgets on a server that is nearly full, and what stays."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tests.servers import binary, cluster_group
from tokenbus.bus.keys import TOPICS, Keys
from tokenbus.bus.run_record import ARCHIVE, ENDED_AT, RECORD
from tokenbus.bus.scripts.topics import ends, trimmed
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.parser import byte_bounds, room
from tokenbus_services.parser.room import LESS, RoomKeeper
from tokenbus_services.process.embedded_server import EmbeddedServer
from tokenbus_services.settings import ArchiveSettings, RetentionSettings, Settings

KEYS = Keys("room", 6)
ENTRIES, BYTES = 40, 64 * 2**10
HOUR_MS = 3_600_000
BEGIN = 0.8


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    with EmbeddedServer(binary=binary()) as process:
        async with Server(process.url) as server:
            await server.clock.measure()
            yield server


def keeper(
    server: Server, owned: Sequence[int], *, share: float = BEGIN, archive: ArchiveSettings | None = None, **bounds: int
) -> RoomKeeper:
    retention = RetentionSettings(full_share=share, **bounds)
    settings = Settings(prefix=KEYS.prefix, partitions=KEYS.partitions, retention=retention, archive=archive)
    return RoomKeeper(server, settings, CollectorRegistry(), owned=lambda: owned)


async def put(server: Server, stream: str, *, entries: int = ENTRIES) -> None:
    """Give the stream a past of an hour."""
    now = server.clock.now_ms()
    pipe = server.client.pipeline(transaction=False)
    for n in range(entries):
        pipe.xadd(stream, {"d": bytes(BYTES)}, id=f"{now - HOUR_MS + n * HOUR_MS // entries}-0")
    await pipe.execute()


async def put_run(server: Server, run: str, *, age_ms: int, **fields: str) -> None:
    """An ended run of partition 0."""
    keys = KEYS.within(0)
    await server.client.hset(keys.run(run), mapping={"status": "completed", "d": bytes(BYTES), **fields})
    await server.client.xadd(keys.log(run), {"d": "x"})
    await server.client.xadd(keys.tree(run), {run: "0-0 0"})
    await server.client.zadd(keys.ended_runs(0), {run: server.clock.now_ms() - age_ms})


async def fill(client: Any, share: float = 1.0, **where: Any) -> None:
    """Let this share of its memory be in use."""
    used = (await client.info("memory", **where))["used_memory"]
    await client.config_set("maxmemory", int(used / share), **where)


async def share_of(client: Any, **where: Any) -> float:
    memory = await client.info("memory", **where)
    return memory["used_memory"] / memory["maxmemory"]


async def test_a_run_stays_until_its_record_was_taken_and_others_go_before_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "STEP_RUNS", 4)
    recorded = [f"recorded{n}" for n in range(10)]
    plain = [f"plain{n}" for n in range(30)]
    for n, run in enumerate(recorded):
        await put_run(server, run, age_ms=2 * HOUR_MS - n, **{RECORD: "1"})
    for n, run in enumerate(plain):
        await put_run(server, run, age_ms=HOUR_MS - n)
    await server.client.config_set("maxmemory", 1)
    keep, keys = keeper(server, [0]), KEYS.within(0)

    async def left() -> set[str]:
        return {run for run in (*recorded, *plain) if await server.client.exists(*keys.kept_of(run))}

    await keep.look()
    assert await left() == {*recorded}
    assert {run.decode() for run in await server.client.zrange(keys.ended_runs(0), 0, -1)} == {*recorded}
    for run in recorded[:5]:
        await server.client.hdel(keys.run(run), RECORD)
    await keep.look()
    assert await left() == {*recorded[5:]}


async def test_dead_letters_make_room_like_topics_oldest_first(server: Server) -> None:
    for stream in (KEYS.dead, *(KEYS.topic(0, topic) for topic in TOPICS)):
        await put(server, stream)
    await fill(server.client)
    await keeper(server, [0, 1]).look()
    assert await share_of(server.client) <= BEGIN * (1 - LESS) + 0.01
    firsts = [await server.client.xrange(stream, count=1) for stream in (KEYS.dead, KEYS.topic(0, TOPICS[0]))]
    ages = [int(first[0][0].split(b"-")[0]) for first in firsts]
    assert abs(ages[0] - ages[1]) < HOUR_MS // 4, "none of them is kept for the other"


@pytest.mark.parametrize("share", [BEGIN, 1.0])
async def test_a_bound_in_bytes_holds_without_maxmemory_and_below_it(server: Server, share: float) -> None:
    for topic in TOPICS:
        await put(server, KEYS.topic(0, topic))
    used = (await server.client.info("memory"))["used_memory"]
    await server.client.config_set("maxmemory", 0 if share == 1 else 10 * used)
    await keeper(server, [0], share=share, memory_bytes=2 * used).look()
    assert await server.client.xlen(KEYS.topic(0, TOPICS[0])) == ENTRIES
    await keeper(server, [0], share=share, memory_bytes=used - 1).look()
    assert (await server.client.info("memory"))["used_memory"] <= used * (1 - LESS + 0.01)


async def test_a_stream_keeps_its_newest_entry_so_that_a_reader_who_begins_there_misses_nothing(server: Server) -> None:
    topics = [KEYS.topic(0, topic) for topic in TOPICS]
    for stream in topics:
        await put(server, stream)
    await server.client.config_set("maxmemory", 1)
    await keeper(server, [0]).look()
    assert [await server.client.xlen(stream) for stream in topics] == [1] * len(topics)
    await server.client.config_set("maxmemory", 0)
    cursors = [cursor.decode() for cursor in await run_script(server, ends(topics))]
    for stream in topics:
        await server.client.xadd(stream, {"d": "new"})
    assert await run_script(server, trimmed(topics, cursors=cursors)) == [b""] * len(topics)


async def test_only_the_owner_of_one_partition_looks_after_the_dead_letters(server: Server) -> None:
    await put(server, KEYS.dead)
    await fill(server.client)
    await keeper(server, [1, 2]).look()
    assert await server.client.xlen(KEYS.dead) == ENTRIES
    await keeper(server, [0]).look()
    assert await server.client.xlen(KEYS.dead) < ENTRIES


async def test_room_that_is_made_again_and_again_is_reported_once_a_minute(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = keeper(server, [0])
    with capture_logs() as logs:
        for n in range(3):
            await put_run(server, f"run{n}", age_ms=HOUR_MS)
            await server.client.config_set("maxmemory", 1)
            await keep.look()
            await server.client.config_set("maxmemory", 0)
        monkeypatch.setattr(room, "SAID_S", -1.0)
        keep._say_at = 0.0  # pyright: ignore[reportPrivateUsage] # a minute later
        await put_run(server, "run3", age_ms=HOUR_MS)
        await server.client.config_set("maxmemory", 1)
        await keep.look()
    assert [(said["event"], said["runs"]) for said in logs] == [("room_made", 1), ("room_made", 3)]


async def test_who_has_nothing_to_forget_says_so_if_the_others_made_no_room_either(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, other = keeper(server, [1]), keeper(server, [0])
    await put_run(server, "run", age_ms=HOUR_MS)
    await server.client.config_set("maxmemory", 1)
    with capture_logs() as logs:
        await empty.look()
        await other.look()
        assert [said["event"] for said in logs] == ["room_made"]
        monkeypatch.setattr(room, "OTHERS_S", 0.0)
        await empty.look()
    assert [said["event"] for said in logs] == ["room_made", "room_not_found"]


async def test_in_a_cluster_only_the_node_that_is_full_gets_room(tmp_path: Any) -> None:
    with cluster_group() as group:
        async with Server(group.url) as server:
            await server.clock.measure()
            client = server.client
            owned = range(KEYS.partitions)
            streams = [KEYS.dead, *(KEYS.topic(partition, TOPICS[0]) for partition in owned)]
            for stream in streams:
                await put(server, stream)
            node_of = {stream: client.get_node_from_key(stream) for stream in streams}
            full = node_of[KEYS.dead]
            assert {node.name for node in node_of.values()} > {full.name}
            await fill(client, target_nodes=full)
            await keeper(server, owned).look()
            assert await share_of(client, target_nodes=full) <= BEGIN
            lengths = {stream: await client.xlen(stream) for stream in streams}
    shorter = {stream for stream in streams if lengths[stream] < ENTRIES}
    assert shorter <= {stream for stream in streams if node_of[stream].name == full.name}
    assert shorter


async def test_a_topic_keeps_to_its_bytes_and_no_less_than_a_reader_reads_at_once(server: Server) -> None:
    keys = KEYS.within(0)
    large, small = keys.topic(0, "chunks"), keys.topic(0, "blocks")
    for stream, size, entries in ((large, 1000, 4_000), (small, 10, 2_000)):
        pipe = server.client.pipeline(transaction=False)
        for _ in range(entries):
            pipe.xadd(stream, {"d": bytes(size)})
        await pipe.execute()
    most = 2 * 2**20
    assert await server.client.memory_usage(large) > most
    await keeper(server, [0], topic_bytes=most).look()
    assert 0.7 * most < await server.client.memory_usage(large) <= most
    assert await server.client.xlen(small) == 2_000
    await keeper(server, [0], topic_bytes=1000).look()
    assert 1_000 <= await server.client.xlen(large) < 1_200


async def test_ended_runs_keep_to_their_bytes_the_oldest_go_and_what_is_to_be_archived_waits_its_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "BOUNDS_S", 0.0)
    now, keys = server.clock.now_ms(), KEYS.within(0)
    names = [f"run{n}" for n in range(20)]
    for n, run in enumerate(names):
        age_ms = 30_000 - n
        held = {ARCHIVE: "1", ENDED_AT: str(now - age_ms)} if n < 2 else {}
        await put_run(server, run, age_ms=age_ms, **held)
    await put_run(server, "s.0a.0b.1", age_ms=40_000)  # of a session: its history
    size = sum([await server.client.memory_usage(key) for key in keys.kept_of("run5")])
    bounds = keeper(server, [0], ended_bytes=12 * size, archive=ArchiveSettings(hold_s=60))
    monkeypatch.setattr(byte_bounds, "FORGOTTEN", 1)
    for _ in range(2):  # a look takes eight steps at most
        await bounds.look()
    left = [run for run in names if await server.client.exists(keys.run(run))]
    assert left == [*names[:2], *names[-len(left) + 2 :]]
    assert 9 <= len(left) <= 12
    assert await server.client.exists(keys.run("s.0a.0b.1"))
    await put_run(server, "new", age_ms=0)
    await bounds.look()
    assert await server.client.exists(keys.run("new"))
    await keeper(server, [0], ended_bytes=5 * size, archive=ArchiveSettings(hold_s=10)).look()
    assert not await server.client.exists(*keys.kept_of("run0"))

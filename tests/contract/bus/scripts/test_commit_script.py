"""The commit of an ordered stage: everything at once or nothing, once."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError

from tests.contract.bus.state import everything
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.bus.scripts.script import MAX_VALUES
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

GROUP = "g"


class Scene:
    """One partition of a group, with its lease taken."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.lease = keys.lease(0, GROUP)
        self.stream = keys.topic(0, "raw")
        self.run = next(f"r{i}" for i in range(100) if keys.partition_of(f"r{i}") == 0)
        self.token = b""

    async def acquire(self, owner: str = "a", ttl_ms: int = 60_000) -> None:
        call = scripts.acquire(self.lease, self.stream, owner=owner, ttl_ms=ttl_ms, mirror=GROUP)
        self.token = (await run_script(self.server, call))[0]

    async def feed(self, number: int) -> list[str]:
        return [(await self.server.client.xadd(self.stream, {"r": "1234"})).decode() for _ in range(number)]

    def writes(self) -> Commit:
        keys, commit = self.keys, Commit(self.lease, self.stream)
        commit.publish(keys.log(self.run), "1-0", b'{"n":1}', [keys.topic(0, "visible"), keys.topic(0, "chunks")])
        commit.publish(keys.log(self.run), "1-1", b'{"n":2}', [])
        commit.append(keys.topic(0, "events"), [self.run, b"frame"])
        commit.arrived(keys.lease(0, "next"), 5)
        commit.put(keys.run(self.run), "status", "open", "attempt", 1)
        commit.put(keys.run(self.run), "gone", 1)
        commit.drop(keys.run(self.run), "gone")
        commit.expire(keys.run(self.run), 60_000)
        commit.expire(keys.log(self.run), 60_000)
        self.close(commit)
        return commit

    def close(self, commit: Commit, attempt: int = 1) -> None:
        places = (self.keys.topic(0, "raw"), self.keys.lease(0, "norm"), self.keys.topic(0, "control"))
        run, status = self.keys.run(self.run), b"closed"
        commit.close_attempt(run, attempt, *places, run=self.run, lost=b"lost", control_frame=status)

    async def commit(self, commit: Commit | None = None, *, begin: str = "0-0", end: str, **options: Any) -> list[Any]:
        commit = commit or Commit(self.lease, self.stream)
        standard: dict[str, Any] = {
            "token": self.token.decode(),
            "ttl_ms": 60_000,
            "watermark": end,
            "entries": 1,
            "size": 4,
            "mirror": GROUP,
            "entries_read": True,
            "topic_entries": 1000,
        }
        return await run_script(self.server, commit.call(begin=begin, end=end, **(standard | options)))

    async def lag(self) -> int:
        [group] = [g for g in await self.server.client.xinfo_groups(self.stream) if g["name"] == GROUP.encode()]
        return group["lag"]


@pytest.fixture
async def scene(server: Server, keys: Keys) -> Scene:
    scene = Scene(server, keys)
    await scene.acquire()
    return scene


async def test_a_commit_writes_outputs_offset_watermark_and_counters_at_once(scene: Scene):
    client, keys, run = scene.server.client, scene.keys, scene.run
    first, second = await scene.feed(2)
    await client.hset(keys.lease(0, "next"), mapping={"arrived": 100, "done": 70})
    reply = await scene.commit(scene.writes(), end=second, watermark=first, entries=2, size=8)
    assert reply == [b"ok", second.encode(), 35]
    log = await client.xrange(keys.log(run))
    assert log == [(b"1-0", {b"__data__": b'{"n":1}'}), (b"1-1", {b"__data__": b'{"n":2}'})]
    for topic in ("visible", "chunks"):
        assert [f for _, f in await client.xrange(keys.topic(0, topic))] == [{b"__data__": b'{"n":1}'}]
    assert [f for _, f in await client.xrange(keys.topic(0, "events"))] == [{run.encode(): b"frame"}]
    assert await client.hgetall(keys.run(run)) == {b"status": b"open", b"attempt": b"1", b"closed": b"1"}
    assert await client.pttl(keys.run(run)) > 0
    assert await client.pttl(keys.log(run)) > 0
    assert (await client.xrevrange(scene.stream, count=1))[0][1] == {run.encode(): b"lost"}
    assert await client.hget(keys.lease(0, "norm"), "arrived") == b"4"
    lease = await client.hmget(scene.lease, "offset", "watermark", "entries", "done")
    assert lease == [second.encode(), first.encode(), b"2", b"8"]


async def test_the_same_commit_again_writes_nothing(scene: Scene):
    [end] = await scene.feed(1)
    await scene.commit(scene.writes(), end=end)
    before = await everything(scene.server, scene.keys)
    assert await scene.commit(scene.writes(), end=end) == [b"already", end.encode()]
    assert await everything(scene.server, scene.keys) == before


async def test_an_older_token_is_fenced_and_writes_nothing(scene: Scene):
    [end] = await scene.feed(1)
    old = scene.token
    await run_script(scene.server, scripts.release(scene.lease, token=old.decode()))
    await scene.acquire("b")
    before = await everything(scene.server, scene.keys)
    assert await scene.commit(scene.writes(), end=end, token=old) == [b"fenced", scene.token]
    assert await everything(scene.server, scene.keys) == before


async def test_a_commit_to_a_server_that_lost_its_data_is_fenced(scene: Scene):
    await scene.server.client.delete(scene.lease)
    before = await everything(scene.server, scene.keys)
    assert await scene.commit(scene.writes(), end="1-1") == [b"fenced", b"0"]
    assert await everything(scene.server, scene.keys) == before


async def test_a_commit_that_does_not_begin_at_the_offset_writes_nothing(scene: Scene):
    first, second, third = await scene.feed(3)
    await scene.commit(end=first)
    before = await everything(scene.server, scene.keys)
    assert await scene.commit(scene.writes(), begin=second, end=third) == [b"moved", first.encode()]
    assert await scene.commit(scene.writes(), begin="0-0", end=third) == [b"moved", first.encode()]
    assert await everything(scene.server, scene.keys) == before


async def test_a_commit_keeps_the_lease_like_a_renewal(scene: Scene):
    await scene.acquire(ttl_ms=0)
    [end] = await scene.feed(1)
    await scene.commit(end=end)
    assert (await run_script(scene.server, scripts.acquire(scene.lease, scene.stream, owner="b", ttl_ms=1)))[0] == b""


async def test_an_attempt_is_closed_once_and_its_fetcher_notified(scene: Scene):
    first, second, third = await scene.feed(3)
    for begin, end in (("0-0", first), (first, second)):
        commit = Commit(scene.lease, scene.stream)
        scene.close(commit)
        commit.expire(scene.keys.run(scene.run), 60_000)
        await scene.commit(commit, begin=begin, end=end, watermark="0-0")
    assert await scene.server.client.xlen(scene.stream) == 4
    commit = Commit(scene.lease, scene.stream)
    scene.close(commit, attempt=2)
    await scene.commit(commit, begin=second, end=third, watermark="0-0")
    assert await scene.server.client.xlen(scene.stream) == 5
    assert await scene.server.client.hget(scene.keys.lease(0, "norm"), "arrived") == b"8"
    broadcast = await scene.server.client.xrange(scene.keys.topic(0, "control"))
    assert [fields for _, fields in broadcast] == [{scene.run.encode(): b"closed"}] * 2


async def test_an_event_that_the_log_has_is_not_published_again_and_stops_no_commit_midway(scene: Scene):
    client, log = scene.server.client, scene.keys.log(scene.run)
    await client.xadd(log, {"__data__": "later"}, id="1-5")
    [end] = await scene.feed(1)
    assert (await scene.commit(scene.writes(), end=end))[0] == b"ok"
    assert [entry_id for entry_id, _ in await client.xrange(log)] == [b"1-5"]
    assert await client.xlen(scene.keys.topic(0, "visible")) == 0
    assert await client.hget(scene.lease, "offset") == end.encode()


async def test_a_batch_that_the_server_lost_after_it_was_read_is_refused(scene: Scene):
    first, second = await scene.feed(2)
    await scene.server.client.xdel(scene.stream, second)
    before = await everything(scene.server, scene.keys)
    assert await scene.commit(scene.writes(), end=second, entries=2) == [b"gone", second.encode()]
    assert await everything(scene.server, scene.keys) == before
    assert (await scene.commit(scene.writes(), end=first))[0] == b"ok"


async def test_a_commit_that_reads_nothing_or_shows_no_offset_needs_no_entry(scene: Scene):
    first, second = await scene.feed(2)
    await scene.commit(end=first)
    await scene.server.client.delete(scene.stream)
    assert (await scene.commit(begin=first, end=first))[0] == b"ok"
    assert (await scene.commit(begin=first, end=second, mirror=""))[0] == b"ok"


async def test_while_something_is_owed_only_the_commit_that_writes_it_is_accepted(scene: Scene):
    """What is owed has a name, which changes with each part that is written."""
    [end] = await scene.feed(1)
    await scene.commit(end=end, owes="a 2")
    before = await everything(scene.server, scene.keys)
    for owed, owes in (("", ""), ("", "b 1"), ("a 1", ""), ("b 2", "b 1")):
        refused = await scene.commit(scene.writes(), begin=end, end=end, owed=owed, owes=owes)
        assert refused == [b"moved", end.encode()]
    assert await scene.commit(scene.writes(), end=end, owes="a 2") == [b"already", end.encode()]
    assert await everything(scene.server, scene.keys) == before
    assert (await scene.commit(scene.writes(), begin=end, end=end, owed="a 2", owes="a 1"))[0] == b"ok"
    before = await everything(scene.server, scene.keys)
    again = await scene.commit(scene.writes(), begin=end, end=end, owed="a 2", owes="a 1")
    assert again == [b"already", end.encode()]
    assert await everything(scene.server, scene.keys) == before


async def test_only_the_owner_of_the_lease_stores_what_it_owes(scene: Scene):
    old, owed = scene.token.decode(), scene.keys.owed(0, GROUP)

    async def store(token: str) -> int:
        part = scripts.owe(scene.lease, owed, token=token, name="a 1", part=b"part", ttl_ms=60_000)
        return await run_script(scene.server, part)

    await run_script(scene.server, scripts.release(scene.lease, token=old))
    await scene.acquire("b")
    assert await store(old) == 0
    assert not await scene.server.client.exists(owed)
    assert await store(scene.token.decode()) == 1
    assert await scene.server.client.hgetall(owed) == {b"a 1": b"part"}


async def test_what_a_commit_wrote_of_one_run_can_be_repeated_and_writes_once(scene: Scene):
    keys, client = scene.keys, scene.server.client
    first, second, third = await scene.feed(3)
    once = scene.writes()
    await scene.commit(once, end=first)
    before = await everything(scene.server, keys)
    for begin, end in ((first, second), (second, third)):
        again = Commit(scene.lease, scene.stream)
        again.repeat(once, {keys.run(scene.run), keys.log(scene.run)})
        await scene.commit(again, begin=begin, end=end)
        if end == second:
            for key in (keys.run(scene.run), keys.log(scene.run), *(keys.topic(0, t) for t in ("visible", "chunks"))):
                assert await client.dump(key) == before[key.encode()]
            assert await client.xlen(keys.topic(0, "events")) == 1
            await client.delete(keys.run(scene.run), keys.log(scene.run), keys.topic(0, "visible"))
    assert await client.hmget(keys.run(scene.run), "status", "closed") == [b"open", b"1"]
    assert await client.xlen(keys.topic(0, "visible")) == 1
    assert [entry_id for entry_id, _ in await client.xrange(keys.log(scene.run))] == [b"1-0", b"1-1"]


async def test_the_mirror_shows_the_exact_lag(scene: Scene):
    ids = await scene.feed(7)
    begin = "0-0"
    for end, entries in ((ids[2], 3), (ids[3], 1), (ids[6], 3)):
        await scene.commit(begin=begin, end=end, entries=entries)
        assert await scene.lag() == 6 - ids.index(end)
        begin = end
    late = await scene.feed(2)
    assert await scene.lag() == 2
    await scene.commit(begin=begin, end=late[1], entries=2)
    assert await scene.lag() == 0


async def test_the_mirror_follows_on_a_server_without_entries_read(scene: Scene):
    first, _ = await scene.feed(2)
    await scene.commit(end=first, entries_read=False)
    [group] = await scene.server.client.xinfo_groups(scene.stream)
    assert group["last-delivered-id"] == first.encode()


async def test_a_removed_mirror_stops_no_commit(scene: Scene):
    [end] = await scene.feed(1)
    await scene.server.client.xgroup_destroy(scene.stream, GROUP)
    assert (await scene.commit(end=end))[0] == b"ok"


async def test_input_is_trimmed_up_to_the_watermark_and_never_past_it(scene: Scene):
    ids = await scene.feed(500)
    await scene.commit(end=ids[-1], watermark=ids[250], entries=500)
    kept = [entry_id.decode() for entry_id, _ in await scene.server.client.xrange(scene.stream)]
    assert len(kept) < 500
    assert set(ids[250:]) <= set(kept)


async def test_without_a_mirror_the_input_is_left_alone(scene: Scene):
    ids = await scene.feed(300)
    await scene.commit(end=ids[-1], mirror="")
    assert await scene.server.client.xlen(scene.stream) == 300


async def test_public_topics_keep_about_as_many_entries_as_asked(scene: Scene):
    topic, begin, published = scene.keys.topic(0, "chunks"), "0-0", 0
    for end in await scene.feed(10):
        commit = Commit(scene.lease, scene.stream)
        for n in range(50):
            commit.publish(scene.keys.log(scene.run), f"1-{published + n}", b"{}", [topic])
        published += 50
        commit.expire(scene.keys.log(scene.run), 60_000)
        await scene.commit(commit, begin=begin, end=end, topic_entries=100)
        begin = end
    assert 100 <= await scene.server.client.xlen(topic) < 300


async def test_an_entry_may_have_as_many_values_as_lua_can_take(scene: Scene):
    [end] = await scene.feed(1)
    commit = Commit(scene.lease, scene.stream)
    fields: list[Arg] = [str(i) for i in range(MAX_VALUES)]
    commit.append(scene.keys.topic(0, "events"), fields)
    with pytest.raises(AssertionError):
        commit.append(scene.keys.topic(0, "events"), [*fields, "a", "b"])
    assert (await scene.commit(commit, end=end))[0] == b"ok"
    [(_, written)] = await scene.server.client.xrange(scene.keys.topic(0, "events"))
    assert len(written) == MAX_VALUES // 2


async def test_a_shared_key_of_another_type_fails_the_commit_before_it_writes(scene: Scene):
    [end] = await scene.feed(1)
    await scene.server.client.set(scene.keys.topic(0, "control"), "somebody's own")  # what the commit writes last
    before = await everything(scene.server, scene.keys)
    with pytest.raises(ResponseError, match=r"WRONGTYPE .*control is a string, no stream"):
        await scene.commit(scene.writes(), end=end)
    assert await everything(scene.server, scene.keys) == before


@pytest.mark.parametrize("name", ["run", "log"])
async def test_a_runs_key_of_another_type_is_left_alone_and_all_else_is_written(scene: Scene, name: str):
    client, keys = scene.server.client, scene.keys
    alien = keys.run(scene.run) if name == "run" else keys.log(scene.run)
    await client.set(alien, "somebody's own")
    [end] = await scene.feed(1)
    commit = scene.writes()
    commit.append(keys.topic(0, "turns"), ["another run", b"frame"])
    assert (await scene.commit(commit, end=end))[:2] == [b"ok", end.encode()]
    assert await client.getdel(alien) == b"somebody's own"
    assert [f for _, f in await client.xrange(keys.topic(0, "turns"))] == [{b"another run": b"frame"}]
    assert [f for _, f in await client.xrange(keys.topic(0, "visible"))] == [{b"__data__": b'{"n":1}'}]
    assert await client.hget(scene.lease, "offset") == end.encode()

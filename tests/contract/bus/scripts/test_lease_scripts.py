"""The scripts of leases and members, refusals included."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.bus.state import everything
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server


class Scene:
    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.lease = keys.lease(0, "g")
        self.stream = keys.topic(0, "raw")

    async def acquire(self, owner: str, ttl_ms: int = 10_000, **options: str) -> list[Any]:
        return await run_script(
            self.server, scripts.acquire(self.lease, self.stream, owner=owner, ttl_ms=ttl_ms, **options)
        )

    async def renew(self, token: bytes) -> bytes:
        return await run_script(
            self.server, scripts.renew(self.lease, self.stream, token=token.decode(), ttl_ms=10_000)
        )

    async def release(self, token: bytes) -> int:
        return await run_script(self.server, scripts.release(self.lease, token=token.decode()))

    async def counters(self) -> list[bytes | None]:
        return await self.server.client.hmget(self.lease, "arrived", "done")


@pytest.fixture
def scene(server: Server, keys: Keys) -> Scene:
    return Scene(server, keys)


async def test_the_first_owner_begins_at_the_beginning(scene: Scene):
    token, offset, watermark, _ = await scene.acquire("a")
    assert token.endswith(b":a")
    assert (offset, watermark) == (b"0-0", b"0-0")


async def test_the_first_owner_may_begin_at_the_end(scene: Scene):
    assert (await scene.acquire("a", start="$"))[1] == b"0-0"
    await scene.server.client.delete(scene.lease)
    last = await scene.server.client.xadd(scene.stream, {"r": "1"})
    assert (await scene.acquire("a", start="$"))[1:3] == [last, last]


async def test_a_held_lease_is_refused_and_nothing_is_written(scene: Scene):
    await scene.acquire("a")
    before = await everything(scene.server, scene.keys)
    assert await scene.acquire("b") == [b"", b"a", b""]
    assert await everything(scene.server, scene.keys) == before


async def test_an_expired_lease_goes_to_the_next_with_a_newer_token(scene: Scene):
    first = await scene.acquire("a", ttl_ms=1)
    await scene.server.client.hset(scene.lease, mapping={"offset": "7-1", "watermark": "5-0"})

    async def taken() -> Any:
        reply = await scene.acquire("b")
        return reply if reply[0] else None

    token, offset, watermark, _ = await eventually(taken)
    assert token > first[0]
    assert (offset, watermark) == (b"7-1", b"5-0")


async def test_the_owner_may_take_its_lease_again_which_fences_what_it_sent_before(scene: Scene):
    first = (await scene.acquire("a"))[0]
    second = (await scene.acquire("a"))[0]
    assert second > first
    assert await scene.renew(first) == b""
    assert await scene.renew(second) == b"0-0"


async def test_a_server_that_lost_its_data_gives_no_token_twice(scene: Scene):
    first = (await scene.acquire("a"))[0]

    async def lost_and_taken() -> bool:
        await scene.server.client.delete(scene.lease)
        return (await scene.acquire("b"))[0] > first  # a millisecond later, that is

    await eventually(lost_and_taken)
    ahead = int(first.split(b":")[0]) + 10**9  # and a clock that went back does not matter
    await scene.server.client.hset(scene.lease, "token", f"{ahead}:b")
    assert (await scene.acquire("b"))[0] == b"%d:b" % (ahead + 1)


async def test_no_clock_gives_two_owners_the_same_token(scene: Scene):
    token = (await scene.acquire("a"))[0]
    number, _, _ = token.partition(b":")
    await scene.server.client.hset(scene.lease, mapping={"token": number + b":b", "owner": "b"})
    assert await scene.renew(token) == b""
    assert await scene.release(token) == 0


async def test_a_token_is_stored_unchanged(scene: Scene):
    for at in (1_700_000_000_000, 1_763_712_345_678, 2**53 - 2):
        await scene.server.client.hset(scene.lease, "token", at + 10**12 if at < 2**52 else at)
        token = (await scene.acquire("a"))[0]
        assert await scene.server.client.hget(scene.lease, "token") == token
        assert await scene.renew(token) == b"0-0"


async def test_the_mirror_is_a_consumer_group_at_the_offset(scene: Scene):
    await scene.acquire("a", mirror="g")
    [group] = await scene.server.client.xinfo_groups(scene.stream)
    assert (group["name"], group["last-delivered-id"]) == (b"g", b"0-0")
    await scene.acquire("a", mirror="g")  # a second time it is there already


async def test_a_lease_is_released_only_by_its_token_and_then_free_at_once(scene: Scene):
    token = (await scene.acquire("a"))[0]
    assert await scene.release(b"1:a") == 0
    assert (await scene.acquire("b"))[0] == b""
    assert await scene.release(token) == 1
    assert (await scene.acquire("b"))[0] > token
    assert await scene.release(token) == 0


async def test_renewing_with_an_old_token_writes_nothing(scene: Scene):
    old = (await scene.acquire("a", ttl_ms=0))[0]
    await eventually(lambda: _acquired(scene, "b"))
    before = await everything(scene.server, scene.keys)
    assert await scene.renew(old) == b""
    assert await everything(scene.server, scene.keys) == before


async def _acquired(scene: Scene, owner: str) -> bool:
    return bool((await scene.acquire(owner))[0])


async def test_renewing_corrects_the_lag_only_if_all_input_is_consumed(scene: Scene):
    token = (await scene.acquire("a"))[0]
    last = await scene.server.client.xadd(scene.stream, {"r": "1"})
    await scene.server.client.hset(scene.lease, mapping={"arrived": 100, "done": 40})
    await scene.renew(token)
    assert await scene.counters() == [b"100", b"40"]
    await scene.server.client.hset(scene.lease, "offset", last)
    await scene.renew(token)
    assert await scene.counters() == [b"100", b"100"]
    await scene.server.client.hdel(scene.lease, "arrived")
    await scene.renew(token)
    assert await scene.counters() == [b"0", b"0"]


async def test_members_are_those_that_gave_a_sign_of_life_lately(server: Server, keys: Keys):
    async def present(member: str, ttl_ms: int) -> set[bytes]:
        return set(await run_script(server, scripts.present(keys.members("g"), member=member, ttl_ms=ttl_ms)))

    assert await present("a", 10_000) == {b"a"}
    assert await present("b", 10_000) == {b"a", b"b"}
    await server.client.zincrby(keys.members("g"), -20_000, "a")
    assert await present("b", 10_000) == {b"b"}
    assert 0 < await server.client.pttl(keys.members("g")) <= 100_000


async def test_only_the_owner_takes_back_what_its_replay_counted_and_noted(scene: Scene):
    token = (await scene.acquire("a"))[0].decode()

    async def withdraw(token: str, notes: tuple[str, bytes] | tuple[()] = ()) -> int:
        call = scripts.withdraw_replay(scene.lease, token=token, count="replays", notes=notes)
        return await run_script(scene.server, call)

    assert await withdraw(token) == 0, "nothing is counted"
    await scene.server.client.hset(scene.lease, mapping={"replays": 3, "replaying": "step 7"})
    before = await everything(scene.server, scene.keys)
    assert await withdraw("1:other") == 0
    assert await everything(scene.server, scene.keys) == before
    assert await withdraw(token) == 1
    assert await scene.server.client.hmget(scene.lease, "replays", "replaying") == [b"2", b"step 7"]
    assert await withdraw(token, ("replaying", b"step 1")) == 1
    assert await scene.server.client.hmget(scene.lease, "replays", "replaying") == [b"1", b"step 1"]

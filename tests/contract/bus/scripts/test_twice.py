"""Every script sent twice, and every two that share a key in both orders: derived from the scripts' contracts."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Collection
from itertools import combinations
from typing import Any

import pytest
from redis.crc import key_slot

from tests.contract.bus.scripts.scenes import SCENES, Scene, State, Twice, World
from tests.leaks import BOUNDED
from tests.rows import over_rows
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.script import Contract, ScriptCall, all_scripts, declared
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

pytestmark = pytest.mark.leaves_pending

all_scripts()  # imports the modules
SCRIPTS = sorted(name for name, one in declared.items() if one.package.startswith(scripts.__name__))
STATUSES = b"open cancelling expiring awaited completed incomplete failed cancelled".split()
COUNTERS = b"arrived done entries attempt raw seq replays tries".split()


class Stage:
    """The world, which can be made again as it was."""

    def __init__(self, world: World) -> None:
        self.world, self.client = world, world.client
        self._saved: dict[str, tuple[bytes | None, int]] = {}
        self.begin: State = {}
        """What was there."""

    async def save(self, names: Collection[str]) -> None:
        for name in names:
            self._saved[name] = await self.client.dump(name), await self.client.pttl(name)
        self.begin = await self.read(names)

    async def restore(self, names: Collection[str]) -> None:
        pipe = self.client.pipeline(transaction=True)
        for name in names:
            value, ttl_ms = self._saved[name]
            pipe.delete(name)
            if value is not None:
                pipe.restore(name, max(0, ttl_ms), value)
        await pipe.execute()

    async def read(self, names: Collection[str]) -> dict[str, Any]:
        """What is there, without keys that are missing. A key without a TTL is bounded by trimming."""
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.type(name)
            pipe.pttl(name)
        found = await pipe.execute()
        state: dict[str, Any] = {}
        for name, kind, ttl_ms in zip(names, found[::2], found[1::2], strict=True):
            if kind != b"none":
                state[name] = await self._value(name, kind)
                suffix = name.removeprefix(f"{self.world.keys.prefix}:")
                assert ttl_ms != -1 or BOUNDED.fullmatch(suffix), f"{name} has no TTL"
        return state

    async def _value(self, name: str, kind: bytes) -> Any:
        client = self.client
        match kind:
            case b"hash":
                return await client.hgetall(name)
            case b"zset":
                return dict(await client.zrange(name, 0, -1, withscores=True))
            case b"list":
                return await client.lrange(name, 0, -1)
            case b"string":
                return await client.get(name)
            case b"stream":
                groups = {each["name"]: await self._group(name, each) for each in await client.xinfo_groups(name)}
                return {"entries": await client.xrange(name), "groups": groups}
            case _:
                raise AssertionError(f"{name} is a {kind}")

    async def _group(self, stream: str, group: dict[str, Any]) -> dict[str, Any]:
        pending = await self.client.xpending_range(stream, group["name"], "-", "+", 1000) if group["pending"] else []
        return {
            "last": group["last-delivered-id"],
            "pending": {each["message_id"]: (each["consumer"], each["times_delivered"]) for each in pending},
            "consumers": {each["name"] for each in await self.client.xinfo_consumers(stream, group["name"])},
        }


@pytest.fixture
async def stage(server: Server, keys: Keys) -> AsyncGenerator[Stage]:
    world = World(server, keys)
    await world.build()
    stage = Stage(world)
    names = {key for scenes in SCENES.values() for scene in scenes for key in scene.call(world).keys}
    await stage.save(sorted(names))
    yield stage
    await stage.restore(sorted(names))


def written(call: ScriptCall) -> set[str]:
    """The keys that the contract lets this call write."""
    contract = declared[call.script.name].contract()
    return {key for key, access in zip(call.keys, _accesses(contract, len(call.keys)), strict=True) if "w" in access}


def _accesses(contract: Contract, count: int) -> list[str]:
    single = [access for key in contract.keys if not key.more for access in key.access]
    more = [access for key in contract.keys if key.more for access in key.access]
    rest = count - len(single)
    return single + [more[i % len(more)] for i in range(rest)] if rest else single


def _without_times(state: State, scene: Scene) -> dict[str, Any]:
    """The state without the fields and scores that hold the server's time."""
    ends, names = tuple(scene.times), {name.encode() for name in scene.times}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if ends and key.endswith(ends):
            plain[key] = set(value)
        elif isinstance(value, dict):
            plain[key] = {name: None if name in names else each for name, each in value.items()}
        else:
            plain[key] = value
    return plain


def test_each_script_has_a_scene() -> None:
    assert sorted(SCENES) == SCRIPTS


@over_rows("name", SCRIPTS)
async def test_the_keys_of_a_script_are_in_one_slot_of_a_cluster(stage: Stage, name: str) -> None:
    for scene in SCENES[name]:
        slots = {key_slot(key.encode()): key for key in scene.call(stage.world).keys}
        assert len(slots) == 1, slots


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_sent_twice_answers_and_writes_what_its_contract_says(stage: Stage, name: str) -> None:
    answered = declared[name].contract().twice.partition(":")[0]
    for scene in SCENES[name]:
        call = scene.call(stage.world)
        assert call.script.name == name
        names = sorted(set(call.keys))
        await stage.restore(names)
        none = await stage.read(names)
        first = await run_script(stage.world.server, call)
        one = await stage.read(names)
        _check(stage.world, none, one)
        assert not scene.lasting or scene.lasting(stage.world, one)
        second = await run_script(stage.world.server, call)
        two = await stage.read(names)
        assert {key for key in names if none.get(key) != one.get(key)} <= written(call), "the contract: only read"
        plain = _without_times(one, scene)
        changed = plain != _without_times(none, scene)
        assert changed == (answered != "reads" and not scene.silent), "the first call must take effect"
        if answered == "again":
            assert scene.again, "a scene asserts what a second call does"
            scene.again(Twice(stage.world, none, one, two, (first, second)))
        else:
            assert _without_times(two, scene) == plain
            assert (scene.second is not None) == (answered == "refused" or second != first)
            assert second == (scene.second(stage.world, first) if scene.second else first)


@pytest.mark.skipif("TOKENBUS_TEST_SERVER" in os.environ, reason="the order of scripts is one on all servers")
@pytest.mark.parametrize("name", SCRIPTS)
async def test_scripts_that_share_a_key_may_run_in_any_order_and_one_of_them_again(stage: Stage, name: str) -> None:
    world = stage.world
    acts = [(scene, scene.call(world)) for each in SCRIPTS[SCRIPTS.index(name) :] for scene in SCENES[each]]
    for one, other in combinations(acts, 2):
        keys, more = set(one[1].keys), set(other[1].keys)
        if one[0] not in SCENES[name] or not keys & more & (written(one[1]) | written(other[1])):
            continue
        names = sorted(keys | more)
        for first, second in ((one, other), (other, one)):
            await stage.restore(names)
            order: list[ScriptCall] = []
            try:  # the third call: the reply to the first was lost, and the other ran before it was sent again
                for _, call in (first, second, first):
                    order.append(call)
                    await run_script(world.server, call)
                    if len(order) == 1:
                        continue  # the same in each pair: checked where it is sent twice
                    after = await stage.read(names)
                    _check(world, stage.begin, after)
                    assert not first[0].lasting or first[0].lasting(world, after), "what it achieved was undone"
            except Exception as e:
                e.add_note(" then ".join(call.script.name for call in order))
                raise


def _check(world: World, before: State, after: State) -> None:
    for key, value in after.items():
        if not isinstance(value, dict) or "entries" in value:
            continue
        assert value.get(b"status", b"open") in STATUSES, f"{key} {value}"
        assert all(int(value.get(name, 0)) >= 0 for name in COUNTERS), f"{key} {value}"
        if b"offset" in value:
            was = before.get(key, {}).get(b"offset", b"0-0")
            assert _place(value[b"offset"]) >= _place(was), f"{key}: the offset went back"
    held = {run: int(amount) for run, amount in after.get(world.hold.held, {}).items()}
    assert held.pop(b"", 0) == sum(held.values()), "the sum of what is held"
    if world.hold.ends in after or held:
        assert after.get(world.hold.ends, {}).keys() == held.keys()
    records = after.get(world.keys.records, {})
    assert records.keys() == after.get(world.keys.record_entries, {}).keys()
    dead = after.get(world.keys.dead, {"entries": []})["entries"]
    rejected = after.get(world.keys.rejected, [])
    assert rejected == [entry for entry, _ in dead if entry in rejected]


def _place(entry: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry.split(b"-")))

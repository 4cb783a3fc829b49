"""Joined calls of one script: each is checked by itself, replies keep their order, blocked readers wake once."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from tests.commits import commit_call
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.script import LuaScript, ScriptCall
from tokenbus.bus.server.run_scripts import JOINED_BYTES, run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader


def put(keys: Keys, partition: int, value: bytes) -> ScriptCall:
    """Adds an entry to a stream; an error if the key is not a stream."""
    return ScriptCall(PUT, [keys.topic(partition, "raw")], [value])


PUT = LuaScript("put", lambda: "redis.call('XADD', KEYS[1], '*', 'v', ARGV[1])\nreturn #ARGV[1]\n")
NOTHING = LuaScript(
    "nothing", lambda: "if ARGV[1] == 'nothing' then return nil end\nreturn {KEYS[1] or 'no key', ARGV[2]}\n"
)


async def commands(server: Server) -> int:
    stats = await server.client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


async def test_calls_of_one_script_are_one_command_and_every_reply_is_in_its_place(server: Server, keys: Keys):
    sizes = [3, 0, 7, 1]
    await run_script(server, put(keys, 0, b""))  # the server knows the script alone, and not that of many
    replies = await run_scripts(server, [put(keys, p, b"x" * size) for p, size in enumerate(sizes)])
    assert replies == sizes
    before = await commands(server)
    await run_scripts(server, [put(keys, p, b"x") for p in range(4)])
    assert await commands(server) == before + 1


async def test_calls_may_differ_in_their_number_of_keys_and_arguments_and_reply_nothing(server: Server, keys: Keys):
    calls = [
        ScriptCall(NOTHING, [keys.meta], ["a", "b"]),
        ScriptCall(NOTHING, [], ["nothing"]),
        ScriptCall(NOTHING, [], ["a", "c"]),
        ScriptCall(NOTHING, [keys.dead, keys.meta], ["a"]),
    ]
    assert await run_scripts(server, calls) == [
        [keys.meta.encode(), b"b"],
        None,
        [b"no key", b"c"],
        [keys.dead.encode()],
    ]


async def test_one_call_that_fails_is_an_error_and_those_after_it_have_run(server: Server, keys: Keys):
    await server.client.set(keys.topic(1, "raw"), "no stream", px=60_000)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await run_scripts(server, [put(keys, p, b"x") for p in range(3)])
    assert [await server.client.xlen(keys.topic(p, "raw")) for p in (0, 2)] == [1, 1]


async def test_a_command_stays_within_its_limit_except_for_a_single_larger_call(server: Server, keys: Keys):
    await run_scripts(server, [put(keys, 0, b""), put(keys, 1, b"")])
    await run_script(server, put(keys, 0, b""))  # both scripts are known from now on
    half, large = b"x" * (JOINED_BYTES // 2), b"x" * (JOINED_BYTES + 1)
    for calls, expected in (([half] * 4, 2), ([half, large, half], 3)):
        before = await commands(server)
        assert await run_scripts(server, [put(keys, 0, value) for value in calls]) == [len(value) for value in calls]
        assert await commands(server) == before + expected
    await server.client.unlink(keys.topic(0, "raw"))


async def test_a_reader_that_waits_finds_what_was_written_to_all_partitions_at_the_next_read_at_the_latest(
    server: Server, keys: Keys
):
    reader = StreamReader(server, count=10)
    await run_scripts(server, [put(keys, p, b"before") for p in range(4)])
    offsets = {keys.topic(p, "raw"): "$" for p in range(4)}
    reading = asyncio.create_task(reader.read(offsets))
    await eventually(lambda: _blocked(server))
    await run_scripts(server, [put(keys, p, b"x") for p in range(4)])
    found = await reading
    if len(found) < 4:  # before Redis 7.2 a blocked read gives the stream that woke it, alone
        ids = {stream: await _before_last(server, stream) for stream in offsets if stream not in dict(found)}
        found += await reader.read(ids, block_ms=1)
    assert sorted(stream for stream, _ in found) == sorted(offsets)
    await reader.close()


async def _before_last(server: Server, stream: str) -> str:
    entries = await server.client.xrevrange(stream, count=2)
    return entries[1][0].decode()


async def _blocked(server: Server) -> bool:
    return bool((await server.client.info("clients"))["blocked_clients"])


async def test_commits_of_many_partitions_are_each_fenced_for_itself(server: Server, keys: Keys):
    leases = [keys.lease(p, "g") for p in range(3)]
    acquired = await run_scripts(
        server,
        [scripts.acquire(lease, keys.topic(p, "raw"), owner="a", ttl_ms=60_000) for p, lease in enumerate(leases)],
    )
    tokens = [token.decode() for token, *_ in acquired]
    tokens[1] = "1:a"  # that of an owner before
    calls = [
        commit_call(scripts.Commit(lease, keys.topic(p, "raw")), token=token, ttl_ms=60_000, end="1-0", watermark="1-0")
        for p, (lease, token) in enumerate(zip(leases, tokens, strict=True))
    ]
    assert [reply[0] for reply in await run_scripts(server, calls)] == [b"ok", b"fenced", b"ok"]
    assert [await server.client.hget(lease, "offset") for lease in leases] == [b"1-0", b"0-0", b"1-0"]

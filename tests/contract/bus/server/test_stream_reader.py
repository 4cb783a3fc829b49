"""Plain reads of several streams: each after its own offset, ended early by a wake."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import RedisError

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import stream_reader as reader_module
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader, id_key


async def test_each_stream_is_read_after_its_own_offset_and_bounded(server: Server, keys: Keys):
    streams = [keys.topic(p, "raw") for p in range(3)]
    ids = {s: [(await server.client.xadd(s, {"n": str(n)})).decode() for n in range(4)] for s in streams[:2]}
    reader = StreamReader(server, count=2)
    found = await reader.read({streams[0]: "0-0", streams[1]: ids[streams[1]][2], streams[2]: "0-0"})
    read = {name: [entry_id.decode() for entry_id, _ in entries] for name, entries in found}
    assert read == {streams[0]: ids[streams[0]][:2], streams[1]: ids[streams[1]][3:]}
    assert found[0][1][0][1] == {b"n": b"0"}


async def test_a_read_waits_for_new_entries(server: Server, keys: Keys):
    reader, stream = StreamReader(server, count=10), keys.topic(0, "raw")
    reading = asyncio.create_task(reader.read({stream: "0-0"}))
    await eventually(lambda: _blocked(server))
    await server.client.xadd(stream, {"n": "1"})
    assert [name for name, _ in await reading] == [stream]


async def _blocked(server: Server) -> bool:
    return bool((await server.client.info("clients"))["blocked_clients"])


async def test_a_read_without_new_entries_is_empty(server: Server, keys: Keys):
    reader = StreamReader(server, count=10)
    assert await reader.read({keys.topic(0, "raw"): "0-0"}, block_ms=1) == []
    assert await reader.read({}, block_ms=1) == []


@pytest.mark.parametrize("streams", [0, 2])
async def test_a_wake_ends_the_read_that_waits(
    server: Server, keys: Keys, streams: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reader_module, "MAX_BLOCK_MS", 3_600_000)
    reader = StreamReader(server, count=10)
    offsets = {keys.topic(p, "raw"): "0-0" for p in range(streams)}
    reading = asyncio.create_task(reader.read(offsets, block_ms=3_600_000))
    if streams:
        await eventually(lambda: _blocked(server))
    else:
        await asyncio.sleep(0)
    reader.wake()
    reader.wake()
    assert await reading == []


async def test_a_wake_before_the_read_ends_that_one_and_no_other(server: Server, keys: Keys):
    reader, stream = StreamReader(server, count=10), keys.topic(0, "raw")
    await server.client.xadd(stream, {"n": "1"})
    reader.wake()
    assert await reader.read({stream: "0-0"}) == []
    assert len(await reader.read({stream: "0-0"})) == 1


async def test_after_a_wake_the_connection_serves_the_next_read(server: Server, keys: Keys):
    reader, stream = StreamReader(server, count=1), keys.topic(0, "raw")
    offset = "0-0"
    for n in range(20):
        reading = asyncio.create_task(reader.read({stream: offset}))
        await asyncio.sleep(0)
        reader.wake()
        await reading
        sent = await server.client.xadd(stream, {"n": str(n)})
        [(_, [(entry_id, fields)])] = await reader.read({stream: offset})
        assert (entry_id, fields) == (sent, {b"n": b"%d" % n})
        offset = entry_id.decode()


async def test_a_cancelled_read_is_cancelled(server: Server, keys: Keys):
    reading = asyncio.create_task(StreamReader(server, count=1).read({keys.topic(0, "raw"): "0-0"}))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_an_error_of_the_server_is_the_readers(server: Server, keys: Keys):
    await server.client.set(keys.topic(0, "raw"), "no stream")
    with pytest.raises(RedisError):
        await StreamReader(server, count=1).read({keys.topic(0, "raw"): "0-0"})


def test_entry_ids_sort_as_numbers():
    assert sorted(["10-0", "9-11", "9-2", "9"], key=id_key) == ["9", "9-2", "9-11", "10-0"]

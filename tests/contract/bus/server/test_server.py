"""The connection to one server: server info, the shape of replies, and named errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from tests.servers import binary
from tokenbus.bus.keys import WIRE_VERSION, Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import DeploymentMismatch, ServerFull, ServerTooOld, ServerUnavailable
from tokenbus_services.process.embedded_server import EmbeddedServer


@pytest.fixture
def own_server() -> Generator[EmbeddedServer]:
    """A server that the test may reconfigure or stop."""
    with EmbeddedServer(binary=binary()) as server:
        yield server


async def test_check_prints_name_and_version(server: Server):
    info = await server.check()
    assert info.name in ("redis", "valkey")
    assert info.version >= ((8,) if info.name == "valkey" else (6, 2))
    assert info.eviction == "noeviction"
    assert info.entries_read is (info.version >= (7, 0))


async def test_a_server_older_than_6_2_is_refused_by_name(server: Server, monkeypatch: pytest.MonkeyPatch):
    async def info() -> dict[str, str]:
        return {"redis_version": "6.0.16"}

    monkeypatch.setattr(server.client, "info", info)
    with pytest.raises(ServerTooOld) as refused:
        await server.check()
    assert (refused.value.version, refused.value.minimum) == ("6.0.16", "6.2")


async def test_a_port_without_a_listener_is_reported_as_unavailable_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with Server(f"redis://:secret@127.0.0.1:{port}") as server:
        with pytest.raises(ServerUnavailable, match=f"127.0.0.1:{port}") as gone:
            await server.check()
    assert "secret" not in str(gone.value)


async def test_stream_reads_have_one_shape(server: Server, keys: Keys):
    stream = keys.topic(0, "raw")
    entry = await server.client.xadd(stream, {"f": b"\xff"})
    await server.client.xgroup_create(stream, "g", id="0")
    expected = [[stream.encode(), [(entry, {b"f": b"\xff"})]]]
    assert await server.client.xread({stream: "0"}) == expected
    assert await server.client.xreadgroup("g", "c", {stream: ">"}) == expected
    assert await server.client.xread({stream: entry}, block=1) == []
    assert await server.client.xreadgroup("g", "c", {stream: ">"}) == []
    await server.client.xack(stream, "g", entry)


async def test_a_blocking_read_of_two_seconds_is_not_cut_short(server: Server, keys: Keys):
    assert await server.client.xread({keys.topic(0, "raw"): "$"}, block=2000) == []


async def test_the_first_process_writes_the_deployment_and_later_ones_agree(server: Server, keys: Keys):
    await join_deployment(server, keys)
    await join_deployment(server, keys)
    assert await server.client.hgetall(keys.meta) == {
        b"partitions": str(keys.partitions).encode(),
        b"wire_version": str(WIRE_VERSION).encode(),
    }


async def test_another_number_of_partitions_is_a_mismatch_and_changes_nothing(server: Server, keys: Keys):
    await join_deployment(server, keys)
    with pytest.raises(DeploymentMismatch) as mismatch:
        await join_deployment(server, Keys(keys.prefix, keys.partitions + 1))
    assert (mismatch.value.name, mismatch.value.ours, mismatch.value.theirs) == ("partitions", "5", "4")
    await join_deployment(server, keys)


async def test_another_wire_version_is_a_mismatch(server: Server, keys: Keys):
    await server.client.hset(keys.meta, mapping={"partitions": keys.partitions, "wire_version": 99})
    with pytest.raises(DeploymentMismatch, match="wire_version is 1 or 2 here but 99"):
        await join_deployment(server, keys)


@pytest.mark.parametrize(
    "script",
    [
        "return redis.call('XADD', KEYS[1], '*', 'f', 'v')",
        # Redis 6.2 lets a script in that begins with a read, refuses the command inside and wraps the error in its own.
        "redis.call('EXISTS', KEYS[1]) return redis.call('XADD', KEYS[1], '*', 'f', 'v')",
    ],
)
async def test_out_of_memory_in_a_script_is_server_full(own_server: EmbeddedServer, script: str):
    async with Server(own_server.url) as server:
        await server.client.config_set("maxmemory", 1)
        with pytest.raises(ServerFull), translated(server):
            await server.client.eval(script, 1, "s")


async def test_out_of_memory_is_server_full_with_the_key(own_server: EmbeddedServer):
    async with Server(own_server.url) as server:
        await server.client.config_set("maxmemory", 1)
        with pytest.raises(ServerFull) as full, translated(server, "the-stream"):
            await server.client.xadd("s", {"f": "v"})
        assert full.value.key == "the-stream"


async def test_the_error_of_a_command_in_a_script_is_known_in_the_words_of_redis_6_2(server: Server):
    words = "Error running script (call to f_0): @user_script:1: @user_script: 1: -OOM command not allowed when used"
    with pytest.raises(ServerFull), translated(server):
        raise ResponseError(words, status_code="ERR")


async def test_a_replica_that_takes_no_writes_is_unavailable(own_server: EmbeddedServer):
    async with Server(own_server.url) as server:
        await server.client.replicaof("127.0.0.1", 1)
        with pytest.raises(ServerUnavailable), translated(server):
            await server.client.set("k", "v")


async def test_a_wrong_password_is_unavailable_and_not_shown(own_server: EmbeddedServer):
    async with Server(own_server.url) as server:
        await server.client.config_set("requirepass", "right")
    wrong = own_server.url.replace("//", "//:wr0ng@")
    async with Server(wrong) as server:
        with pytest.raises(ServerUnavailable) as refused:
            await server.check()
    assert "wr0ng" not in str(refused.value)


async def test_an_error_of_the_call_itself_is_raised_unchanged(server: Server, keys: Keys):
    await server.client.hset(keys.meta, "a", "b")
    with pytest.raises(ResponseError, match="WRONGTYPE"), translated(server):
        await server.client.lpush(keys.meta, "x")


async def test_a_command_whose_reply_was_lost_is_not_sent_again():
    received: list[bytes] = []

    async def hang_up_on_xadd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(4096):
            received.append(chunk)
            if b"XADD" in chunk:
                break
            writer.write(b"+OK\r\n" * sum(line.startswith(b"*") for line in chunk.split(b"\r\n")))
        writer.close()

    listener = await asyncio.start_server(hang_up_on_xadd, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, Server(f"redis://127.0.0.1:{port}") as server:
        with pytest.raises(ServerUnavailable), translated(server):
            await server.client.xadd("s", {"f": "v"})
    assert b"".join(received).count(b"XADD") == 1


async def test_a_server_that_comes_back_serves_the_same_connection_pool(tmp_path: Path):
    with EmbeddedServer(tmp_path, binary=binary(), appendonly=True) as own:
        async with Server(own.url) as server:
            await server.client.set("k", "v")
            await asyncio.to_thread(own.stop)
            await asyncio.to_thread(own.start)
            assert await server.client.get("k") == b"v"


async def test_one_read_takes_all_keys_of_a_single_server(server: Server, keys: Keys):
    names = [keys.topic(p, "raw") for p in range(keys.partitions)]
    assert server.read_groups(names) == [names]
    assert server.read_groups([]) == []

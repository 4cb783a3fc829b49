"""What a recorded run keeps of its raw stream, how that is dropped, and the index of records."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import (
    RecordEntry,
    drop_old_records,
    find_record,
    forget_recorded,
    newest_records,
    put_record,
)
from tokenbus.bus.scripts import RawPart
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.errors import RecordNotFound
from tokenbus.events.frames import ANY_FRAME

RUN = "run"


async def begin(server: Server, keys: Keys, **fields: int) -> None:
    await server.client.hset(keys.run(RUN), mapping={"status": "open", "attempt": 1, "raw": 0, **fields})
    await server.client.expire(keys.run(RUN), 60)


async def append(server: Server, keys: Keys, n: int, data: bytes) -> Sequence[bytes | int]:
    partition = keys.partition_of(RUN)
    part = RawPart(RUN, keys.run(RUN), 1, n, final=n == ANY_FRAME, data=data, writer="w")
    return await run_script(
        server, scripts.append_raw(keys.topic(partition, "raw"), keys.lease(partition, "normalizer"), [part])
    )


async def kept(server: Server, keys: Keys) -> dict[bytes, bytes]:
    fields = await server.client.hgetall(keys.run(RUN))
    return {name: value for name, value in fields.items() if name.startswith((b"frame:", b"record"))}


async def test_a_recorded_run_keeps_each_frame_once(server: Server, keys: Keys) -> None:
    await begin(server, keys, record=1000)
    assert (await append(server, keys, 0, b"zero"))[0] == b"ok"
    assert (await append(server, keys, 0, b"zero"))[0] == b"already"
    assert (await append(server, keys, 5, b"from nowhere"))[0] == b"frame 1"
    assert (await append(server, keys, ANY_FRAME, b"lost"))[0] == b"ok"
    assert (await append(server, keys, 1, b"one"))[0] == b"closed"
    assert await kept(server, keys) == {b"record": b"992", b"frame:1:0": b"zero", b"frame:1:-1": b"lost"}


async def test_frames_beyond_the_bytes_that_may_be_kept_are_cut_off_and_still_pass(server: Server, keys: Keys) -> None:
    await begin(server, keys, record=5)
    for n, data in enumerate([b"four", b"four", b"1"]):
        assert (await append(server, keys, n, data))[0] == b"ok"
    found = await kept(server, keys)
    assert found.pop(b"frame:1:0") == b"four"
    assert list(found) == [b"record"], "what is after a gap would be read as something else"
    assert int(found[b"record"]) < 0
    assert await server.client.xlen(keys.topic(keys.partition_of(RUN), "raw")) == 3


async def test_any_other_run_keeps_nothing(server: Server, keys: Keys) -> None:
    await begin(server, keys)
    await append(server, keys, 0, b"zero")
    assert await kept(server, keys) == {}


async def test_the_record_is_deleted_and_the_run_stays(server: Server, keys: Keys) -> None:
    frames = {f"frame:1:{n}": "x" for n in range(9000)}
    await begin(server, keys, record=1)
    await server.client.hset(keys.run(RUN), mapping=frames)
    await server.client.xadd(keys.tape(RUN), {"taken": b"x"})
    await forget_recorded(server, keys, RUN)
    assert await server.client.hgetall(keys.run(RUN)) == {b"status": b"open", b"attempt": b"1", b"raw": b"0"}
    assert not await server.client.exists(keys.tape(RUN))
    await forget_recorded(server, keys, RUN)


def entry(run: str, at_ms: int, status: str = "completed") -> RecordEntry:
    return RecordEntry(
        run=run, at_ms=at_ms, status=status, provider="p", model="m", attempts=1, raw_bytes=1, blob_id="b", size=1
    )


async def test_the_index_has_a_run_once_and_drops_what_is_too_old_or_too_many(server: Server, keys: Keys) -> None:
    now = time.time_ns() // 1_000_000
    most = {"keep_ms": 60_000, "most": 3}
    for run, at_ms in (
        ("old", now - 61_000),
        ("a", now - 3),
        ("b", now - 2),
        ("b", now - 2),
        ("c", now - 1),
        ("d", now),
    ):
        await put_record(server, keys, entry(run, at_ms), **most)
    assert [e.run async for e in newest_records(server, keys)] == ["d", "c", "b"]
    assert await server.client.hlen(keys.record_entries) == 3
    await put_record(server, keys, entry("c", now - 1, "failed"), **most)
    assert (await find_record(server, keys, "c")).status == "failed"
    for gone in ("old", "a"):
        with pytest.raises(RecordNotFound):
            await find_record(server, keys, gone)
    assert await drop_old_records(server, keys, keep_ms=60_000, most=1) == 2
    assert [e.run async for e in newest_records(server, keys)] == ["d"]
    for key in (keys.records, keys.record_entries):
        assert 0 < await server.client.pttl(key) <= 60_000

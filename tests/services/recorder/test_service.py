"""A recorder over a blob store that can be unavailable, refuse, and forget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.waiting import eventually
from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.bus.dead_letters import newest_dead_letters
from tokenbus.bus.erase import erase_runs
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import find_record, newest_records, put_record
from tokenbus.bus.server.server import Server
from tokenbus.errors import BlobError, BlobNotFound, BlobRefused, BlobTooLarge, BlobUnavailable
from tokenbus.events.frames import CONTROL_ATTEMPT, Data, EventFrame, Lost, RawFrame, TapedFrame, encode
from tokenbus.events.requests import Message
from tokenbus_services.recorder import record as records
from tokenbus_services.recorder import service as module
from tokenbus_services.recorder.service import RecordService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import RecordSettings, RetentionSettings, Settings

RUN = "run"
ACCEPTED = time.time_ns() // 1_000_000
IMAGE, EXPIRED = blob_id_of(b"image"), blob_id_of(b"expired")


class Store:
    """A `BlobStreams` in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {IMAGE: b"image"}
        self.leased: list[str] = []
        self.failures: list[BlobError] = []
        """Raised one after the other, before anything is stored."""
        self.asked = asyncio.Event()
        self.stores = asyncio.Event()
        """Until then it stores nothing."""
        self.stores.set()

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        assert isinstance(content, bytes)
        self.asked.set()
        await self.stores.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.kept[blob_id_of(content)] = content
        return BlobRef(blob_id=blob_id_of(content), media_type=media_type, size=len(content))

    async def load(self, blob_id: str) -> bytes:
        return self.kept[blob_id]

    async def lease(self, blob_id: str) -> None:
        if not blob_id:
            raise BlobRefused("blob id", "empty")
        if blob_id not in self.kept:
            raise BlobNotFound(blob_id)
        self.leased.append(blob_id)

    async def head(self, blob_id: str) -> BlobRef:
        raise AssertionError("nobody asks for this here")

    def chunks(self, blob_id: str) -> AsyncGenerator[bytes]:
        raise AssertionError("nobody asks for this here")

    async def aclose(self) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(module, "loader_of", lambda settings: made)
    return made


@asynccontextmanager
async def recorder(server_url: str, keys: Keys, *, lease_s: float = 3600) -> AsyncGenerator[RecordService]:
    keep = RecordSettings()
    settings = Settings(
        redis_url=server_url,
        prefix=keys.prefix,
        partitions=keys.partitions,
        records=keep,
        retention=RetentionSettings(open_run_s=lease_s),
    )
    service = RecordService(WorkerCore(settings, "recorder"))
    await service.open()
    working = asyncio.create_task(_work(service))
    try:
        yield service
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await service.close()


async def _work(service: RecordService) -> None:
    while True:
        await service.start(await service.read())


async def ended_run(server: Server, keys: Keys) -> None:
    """What the server has of a recorded run that is over: frames written out of order, two media."""
    message = {"role": "user", "content": [{"type": "image", "source": {"type": "blob", "blob_id": IMAGE}}]}
    frames = [
        RawFrame(0, 1, 0, 1, [Data(b"zero")]),
        RawFrame(0, 1, 10, 3, [Data(b"ten")]),
        RawFrame(0, 1, -1, 4, [Lost("gone")]),
        RawFrame(0, 2, 2, 2, [Data(b"two")]),
    ]
    await server.client.hset(
        keys.run(RUN),
        mapping={
            "status": "completed",
            "accepted": ACCEPTED,
            "record": 100,
            "request": msgspec.json.encode({"provider": "p", "model": "m", "messages": [message]}),
            **{f"history:{turn}": encode([Message(role="user", content=f"{turn}")]) for turn in (10, 2, 1)},
            **{f"frame:{frame.attempt}:{frame.n}": encode(frame) for frame in reversed(frames)},
        },
    )
    await server.client.xadd(keys.tape(RUN), {"taken": encode(TapedFrame(EventFrame(0, CONTROL_ATTEMPT, 1, []), 0))})
    await server.client.xadd(keys.log(RUN), {"__data__": msgspec.json.encode({"blob_id": EXPIRED})})
    for key in (keys.run(RUN), keys.tape(RUN), keys.log(RUN)):
        await server.client.expire(key, 60)


async def record_one(server: Server, keys: Keys) -> bytes:
    """The entry's id."""
    return await server.client.xadd(keys.topic(keys.partition_of(RUN), "records"), {RUN: "completed"})


async def done(server: Server, keys: Keys) -> None:
    await eventually(lambda: _all_done(server, keys))


async def _all_done(server: Server, keys: Keys) -> bool:
    return not await server.client.xlen(keys.topic(keys.partition_of(RUN), "records"))


async def test_a_record_that_is_being_written_as_its_run_is_erased_does_not_stay(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    store.stores.clear()
    await ended_run(server, keys)
    await record_one(server, keys)
    async with recorder(server_url, keys):
        await store.asked.wait()
        erasing = asyncio.create_task(erase_runs(server, keys, [RUN]))
        await eventually(lambda: _run_is_gone(server, keys))
        store.stores.set()
        assert (await erasing).found["records"] == 1
        await done(server, keys)
        assert [entry async for entry in newest_records(server, keys)] == []


async def _run_is_gone(server: Server, keys: Keys) -> bool:
    return not await server.client.exists(keys.run(RUN))


async def test_a_record_has_all_in_its_order_and_a_second_delivery_changes_nothing(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    await ended_run(server, keys)
    async with recorder(server_url, keys):
        await record_one(server, keys)
        await record_one(server, keys)
        await done(server, keys)
    [entry] = [e async for e in newest_records(server, keys)]
    assert (entry.run, entry.at_ms, entry.status, entry.provider, entry.attempts) == (
        RUN,
        ACCEPTED,
        "completed",
        "p",
        2,
    )
    record = await records.load(entry.blob_id, store)
    assert [(frame.attempt, frame.n) for frame in record.raw_frames()] == [(1, 0), (1, 10), (1, -1), (2, 2)]
    assert len(record.taken()) == 1
    assert list(record.history) == ["1", "2", "10"]
    left = {name for name in await server.client.hkeys(keys.run(RUN)) if not name.startswith(b"history:")}
    assert left == {b"status", b"accepted", b"request"}
    assert IMAGE in entry.parts
    assert EXPIRED not in entry.parts, "a run's media may be gone before its end"


async def test_what_a_dead_recorder_began_to_drop_is_dropped(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    await ended_run(server, keys)
    await server.client.hdel(keys.run(RUN), "record")
    async with recorder(server_url, keys):
        await record_one(server, keys)
        await done(server, keys)
    assert [e async for e in newest_records(server, keys)] == []
    left = {name for name in await server.client.hkeys(keys.run(RUN)) if not name.startswith(b"history:")}
    assert left == {b"status", b"accepted", b"request"}
    assert not await server.client.exists(keys.tape(RUN))


async def test_the_recorder_waits_during_an_outage_of_the_store(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    store.failures = [BlobUnavailable("blobs", "away"), BlobUnavailable("blobs", "away")]
    await ended_run(server, keys)
    async with recorder(server_url, keys):
        await record_one(server, keys)
        await done(server, keys)
    assert (await find_record(server, keys, RUN)).run == RUN
    assert not store.failures


async def test_a_record_that_the_store_does_not_take_makes_room_for_others(
    server: Server, server_url: str, keys: Keys, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STORE_PATIENCE_S", 0.0)
    store.failures = [BlobUnavailable("blobs", "away"), BlobUnavailable("blobs", "away")]
    await ended_run(server, keys)
    async with recorder(server_url, keys):
        first = await record_one(server, keys)
        await done(server, keys)
    assert (await find_record(server, keys, RUN)).run == RUN
    stream = await server.client.xinfo_stream(keys.topic(keys.partition_of(RUN), "records"))
    assert stream["last-generated-id"] != first  # a new entry has its place


async def test_a_record_that_cannot_be_made_is_reported_and_its_run_stays(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    store.failures = [BlobTooLarge(2, 1)]
    await ended_run(server, keys)
    async with recorder(server_url, keys) as service:
        await record_one(server, keys)
        await done(server, keys)
    [dead] = [d async for d in newest_dead_letters(server, keys, most=5)]
    assert (dead.entry.stage, dead.entry.run) == ("recorder", RUN)
    assert "BlobTooLarge" in dead.entry.reason
    registry = service._core.registry
    assert registry.get_sample_value("tokenbus_dead_letters_total", {"kind": "crashed"}) == 1
    assert registry.get_sample_value("tokenbus_dead_letters_total", {"kind": "rejected"}) == 0
    assert [e async for e in newest_records(server, keys)] == []
    assert await server.client.hget(keys.run(RUN), "status") == b"completed"


async def test_leases_of_what_is_indexed_are_renewed(server: Server, server_url: str, keys: Keys, store: Store) -> None:
    await ended_run(server, keys)
    async with recorder(server_url, keys):
        await record_one(server, keys)
        await done(server, keys)
    entry = await find_record(server, keys, RUN)
    wanted = {entry.blob_id, *entry.parts}
    assert len(wanted) == 4, "the record, raw stream and tape, and the image"
    store.leased.clear()
    async with recorder(server_url, keys, lease_s=0.2):
        await eventually(lambda: all(store.leased.count(blob_id) > 1 for blob_id in wanted))


async def test_a_record_that_the_store_refuses_to_lease_keeps_no_other_from_it(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    await ended_run(server, keys)
    async with recorder(server_url, keys):
        await record_one(server, keys)
        await done(server, keys)
    entry = await find_record(server, keys, RUN)
    newer = msgspec.structs.replace(entry, run="newer", at_ms=entry.at_ms + 1, blob_id="", parts=())
    # As long as the recorder keeps them: in a long session a minute from `ACCEPTED` is over, and both are dropped.
    await put_record(server, keys, newer, keep_ms=round(1000 * RecordSettings().keep_s), most=10)
    assert {kept.run async for kept in newest_records(server, keys)} == {RUN, "newer"}
    store.leased.clear()
    async with recorder(server_url, keys, lease_s=0.2):
        # Media of the run, which making its record leases too, once at the most here.
        await eventually(lambda: store.leased.count(IMAGE) > 2)


async def test_a_run_on_which_recorders_die_is_given_up(
    server: Server, server_url: str, keys: Keys, store: Store
) -> None:
    await ended_run(server, keys)
    queue = keys.topic(keys.partition_of(RUN), "records")
    await server.client.xgroup_create(queue, "recorder", id="0", mkstream=True)
    await record_one(server, keys)
    [[_, [(entry_id, _)]]] = await server.client.xreadgroup("recorder", "dead", {queue: ">"})
    await server.client.xclaim(queue, "recorder", "dead", 0, [entry_id], idle=86_400_000, retrycount=3)
    async with recorder(server_url, keys):
        await done(server, keys)
    [dead] = [d async for d in newest_dead_letters(server, keys, most=5)]
    assert "lost 3 times" in dead.entry.reason
    assert list(store.kept) == [IMAGE]

"""A recorder over an archive that hangs, refuses what was erased, and takes each log once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest
from obstore.store import MemoryStore

from tests.services.blobs.conftest import MemoryBlobs, Served
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import has_archive
from tokenbus.bus.run_record import ARCHIVE
from tokenbus.bus.server.server import Server
from tokenbus_services.blobs.archive import Archive, Wanted
from tokenbus_services.blobs.archive_http import ArchiveRoutes
from tokenbus_services.blobs.archive_keys import TenantKeys
from tokenbus_services.blobs.http import Receive, Scope, Send
from tokenbus_services.recorder import service as module
from tokenbus_services.recorder.service import RecordService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import ArchiveSettings, BlobSettings, Settings

RUN = "run"


class Hanging:
    """An archive that answers nobody until it is told to."""

    def __init__(self) -> None:
        blobs = MemoryBlobs(MemoryStore(), None)
        self.archive = Archive(blobs.objects, blobs.store, TenantKeys(None), keep_s=86_400)
        self.answers = asyncio.Event()
        self.asked = 0
        self._routes = ArchiveRoutes(self.archive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        await self.answers.wait()
        await self._routes(scope, receive, send)


@asynccontextmanager
async def recorder(server_url: str, keys: Keys, url: str) -> AsyncGenerator[RecordService]:
    settings = Settings(
        redis_url=server_url,
        prefix=keys.prefix,
        partitions=keys.partitions,
        archive=ArchiveSettings(),
        blobs=BlobSettings(service_url=url),
    )
    service = RecordService(WorkerCore(settings, "recorder"))
    await service.open()

    async def work() -> None:
        while True:
            await service.start(await service.read())

    working = asyncio.create_task(work())
    try:
        yield service
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await service.close()


async def ended_run(server: Server, keys: Keys, run: str) -> None:
    times = {"accepted": 1_700_000_000_000, "ended": 1_700_000_001_000}
    await server.client.hset(keys.run(run), mapping={"status": "completed", "seq": 2, ARCHIVE: 1, **times})
    for seq in range(2):
        event = msgspec.json.encode({"seq": seq, "run": run})
        await server.client.xadd(keys.log(run), {"__data__": event}, id=f"1-{seq + 1}")
    for key in (keys.run(run), keys.log(run)):
        await server.client.expire(key, 60)
    await server.client.xadd(keys.topic(keys.partition_of(run), "records"), {run: "completed"})


async def is_archived(server: Server, keys: Keys, run: str) -> bool:
    return not await server.client.hexists(keys.run(run), ARCHIVE)


async def test_a_store_that_hangs_holds_no_run_longer_than_it_is_kept_and_gets_it_later(
    server: Server, server_url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ARCHIVING_S", 0.2)
    monkeypatch.setattr(module, "STORE_PATIENCE_S", 0.1)
    hanging = Hanging()
    served = Served(hanging)
    await served.start()
    try:
        await ended_run(server, keys, RUN)
        async with recorder(server_url, keys, served.url) as service:
            await eventually(lambda: hanging.asked >= 3)  # it was given back, and taken again
            assert service.ready
            assert 0 < await server.client.ttl(keys.run(RUN)) <= 60
            assert 0 < await server.client.ttl(keys.log(RUN)) <= 60
            assert not await is_archived(server, keys, RUN)
            hanging.answers.set()
            await eventually(lambda: is_archived(server, keys, RUN))
            assert await has_archive(server, keys)
            [info], _ = await hanging.archive.list(Wanted())
            assert (info.run, info.state, info.events) == (RUN, "completed", 2)
            _, pieces = await hanging.archive.open(RUN)
            lines = b"".join([piece async for piece in pieces]).splitlines()
            assert [msgspec.json.decode(line)["seq"] for line in lines] == [0, 1]
    finally:
        hanging.answers.set()
        await served.stop()


async def test_what_was_erased_while_the_recorder_had_it_is_not_stored_and_others_are(
    server: Server, server_url: str, keys: Keys
) -> None:
    hanging = Hanging()
    hanging.answers.set()
    served = Served(hanging)
    await served.start()
    try:
        await hanging.archive.delete(RUN)  # as `tokenbus erase` does, after it deleted the server's copy
        await ended_run(server, keys, RUN)
        await ended_run(server, keys, "other")
        async with recorder(server_url, keys, served.url):
            await eventually(lambda: is_archived(server, keys, "other"))
            queue = keys.topic(keys.partition_of(RUN), "records")
            await eventually(lambda: is_empty(server, queue))
            assert [info.run for info in (await hanging.archive.list(Wanted()))[0]] == ["other"]
    finally:
        await served.stop()


async def is_empty(server: Server, stream: str) -> bool:
    return await server.client.xlen(stream) == 0

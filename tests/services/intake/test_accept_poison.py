"""Requests that intake cannot accept: reported, dead-lettered with their bytes, and blocking no other request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from tests.services.fetcher.blob_store import MemoryBlobs
from tokenbus.bus.dead_letters import DeadLetter, all_dead_letters, drop_dead_letter
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus_services.intake.accept import MAX_DELIVERIES, Intake
from tokenbus_services.intake.blob_offload import IntakeMedia
from tokenbus_services.intake.run_creation import Cancels
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.settings import ProviderSettings, Settings
from tokenbus_services.settings.tables.limits import RetentionSettings


class Finished:
    """In place of the queue: what was done with."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.released: list[str] = []
        self.lost: list[str] = []

    async def still_has(self, item: QueueItem) -> bool:
        return item.entry_id not in self.lost

    def release(self, items: Sequence[QueueItem]) -> None:
        self.released += [item.entry_id for item in items]

    async def finish(self, items: Sequence[QueueItem], *, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """As after a lost connection, when all commands are sent again."""
        self.ids += [item.entry_id for item in items]
        if again:
            await again()


def providers(name: str) -> Any:
    if name == "broken":
        raise RuntimeError("nobody thought of this")
    return name


@pytest.fixture
def queue() -> Finished:
    return Finished()


@pytest.fixture
def intake(server: Server, keys: Keys, queue: Finished) -> Intake:
    return make_intake(server, keys, queue)


def make_intake(server: Server, keys: Keys, queue: Finished, **tables: Any) -> Intake:
    vendors = {name: ProviderSettings(api="anthropic") for name in ("good", "broken")}
    settings = Settings(prefix=keys.prefix, partitions=keys.partitions, providers=vendors, **tables)
    stand_in: Any = queue
    media = IntakeMedia(RecentBlobs(MemoryBlobs(), 0), inline_characters=1)
    cancels = Cancels(server, keys, stand_in)
    return Intake(server, settings, stand_in, cancels, providers=providers, tools=(), media=media)


def item(keys: Keys, n: int, run: str, *, provider: str = "good", deliveries: int = 1) -> QueueItem:
    request = {
        "type": "generate",
        "id": run,
        "provider": provider,
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
    }
    return QueueItem(keys.requests, f"1-{n}", {b"__data__": json.dumps(request).encode()}, deliveries)


async def dead(server: Server, keys: Keys) -> list[DeadLetter]:
    entries = await server.client.xrange(keys.dead)
    return [msgspec.json.decode(fields[b"__data__"], type=DeadLetter) for _, fields in entries]


async def accepted(server: Server, keys: Keys, run: str) -> bool:
    return bool(await server.client.hexists(keys.run(run), "request"))


async def test_an_error_of_any_kind_is_reported_and_other_requests_continue(
    server: Server, keys: Keys, intake: Intake, queue: Finished
):
    await intake.accept([item(keys, 1, "a"), item(keys, 2, "b", provider="broken"), item(keys, 3, "c")])
    assert queue.ids == ["1-1", "1-2", "1-3"]
    assert [await accepted(server, keys, run) for run in "abc"] == [True, False, True]
    assert await server.client.hget(keys.run("b"), "status") == b"open", "its rejection is on its way to the parser"
    [entry] = await dead(server, keys)
    assert (entry.run, entry.stage, entry.stream, entry.entry) == ("b", "intake", keys.requests, "1-2")
    assert entry.reason == "RuntimeError: nobody thought of this"
    [*_, (_, fields)] = await server.client.xrange(keys.topic(keys.partition_of("b"), "events"))
    assert b"poison" in fields[b"b"]
    assert b"nobody thought" not in fields[b"b"], "the text of a defect is the operator's"
    assert json.loads(entry.bytes)["provider"] == "broken"


async def test_a_run_whose_key_has_the_wrong_type_blocks_no_other(
    server: Server, keys: Keys, intake: Intake, queue: Finished
):
    await server.client.set(keys.run("b"), "no hash", px=60_000)
    await intake.accept([item(keys, 1, "a"), item(keys, 2, "b"), item(keys, 3, "c")])
    assert queue.ids == ["1-1", "1-2", "1-3"]
    assert [await accepted(server, keys, run) for run in "ac"] == [True, True]
    [entry] = await dead(server, keys)
    assert entry.run == "b"
    assert "WRONGTYPE" in entry.reason


async def test_a_bad_request_that_cannot_be_dead_lettered_blocks_no_other(
    server: Server, keys: Keys, intake: Intake, queue: Finished, caplog: pytest.LogCaptureFixture
):
    await server.client.set(keys.dead, "no stream", px=60_000)
    await intake.accept([item(keys, 1, "a", provider="broken"), item(keys, 2, "b")])
    assert await accepted(server, keys, "b")
    assert sorted(queue.ids) == ["1-1", "1-2"]
    assert "dead entry is lost: 1-1" in caplog.text


async def test_of_the_requests_on_which_workers_died_the_first_is_given_up_and_the_others_are_tried(
    server: Server, keys: Keys, intake: Intake, queue: Finished
):
    often = MAX_DELIVERIES + 1
    await intake.accept(
        [item(keys, 9, "new"), item(keys, 1, "killer", deliveries=often), item(keys, 2, "beside", deliveries=often)]
    )
    assert sorted(queue.ids) == ["1-1", "1-2", "1-9"]
    assert [await accepted(server, keys, run) for run in ("new", "killer", "beside")] == [True, False, True]
    [entry] = await dead(server, keys)
    assert (entry.run, entry.reason) == (
        "killer",
        f"poison: {MAX_DELIVERIES} workers crashed while accepting the request",
    )


async def test_a_request_that_another_worker_has_claimed_is_not_given_up(
    server: Server, keys: Keys, intake: Intake, queue: Finished
):
    queue.lost = ["1-1"]
    await intake.accept([item(keys, 1, "innocent", deliveries=MAX_DELIVERIES + 1)])
    assert queue.ids == await dead(server, keys) == []


async def test_a_request_that_came_back_less_often_is_taken(server: Server, keys: Keys, intake: Intake):
    await intake.accept([item(keys, 1, "a", deliveries=MAX_DELIVERIES)])
    assert await accepted(server, keys, "a")


async def test_of_an_entry_without_a_request_all_fields_are_kept(server: Server, keys: Keys, intake: Intake):
    await intake.accept([QueueItem(keys.requests, "1-1", {b"other": b"\xff", b"more": b""}, 1)])
    [entry] = await dead(server, keys)
    assert entry.run is None
    assert msgspec.msgpack.decode(entry.bytes, type=dict[bytes, bytes]) == {b"other": b"\xff", b"more": b""}


async def test_however_many_requests_are_refused_they_push_no_poison_out(server: Server, keys: Keys, queue: Finished):
    intake = make_intake(server, keys, queue, retention=RetentionSettings(dead_entries=40))
    counted = Counter[str]()
    server.on_dead_letter = lambda kind: counted.update((kind,))
    await intake.accept([item(keys, 0, "poison", provider="broken")])
    for n in range(1, 101):
        await intake.accept([item(keys, n, f"typo{n}", provider="")])
    entries = await dead(server, keys)
    assert [entry.run for entry in entries] == ["poison", *(f"typo{n}" for n in range(91, 101))]
    assert await server.client.llen(keys.rejected) == 10
    assert counted == {"crashed": 1, "rejected": 100}, "what was written, not what is kept"
    typos = [dead.id async for dead in all_dead_letters(server, keys) if dead.entry.run != "poison"]
    assert await drop_dead_letter(server, keys, typos[:3]) == 3
    assert await server.client.llen(keys.rejected) == 7, "what was dropped no longer counts as rejected"


@pytest.mark.parametrize("deliveries", [1, 2])
async def test_in_a_cluster_a_request_that_could_not_be_handled_is_left_to_another_worker(
    queue: Finished, monkeypatch: pytest.MonkeyPatch, deliveries: int
):
    """There it is handled in the background, where nothing else would give it back."""
    keys = Keys("t", 1)
    async with Server("redis+cluster://127.0.0.1:1") as server:
        intake = make_intake(server, keys, queue)

        async def broken(items: Sequence[QueueItem]) -> None:
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(intake, "_take", broken)
        await intake.accept([item(keys, 1, "a", deliveries=deliveries)])
        assert queue.released == ["1-1"]
        await intake.close()

"""Loops that log a failure and continue: each failure is counted, and a loop that only fails ends its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.services.policy_stage.test_executors import WORK, setup
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import MAX_DEFECTS, Liveness
from tokenbus.bus.work_queue import QueueItem
from tokenbus.errors import BlobUnavailable
from tokenbus.events.public import Completed, Started, Timing
from tokenbus.events.requests import Tool
from tokenbus_services.blobs import app as blobs
from tokenbus_services.blobs.app import BlobService
from tokenbus_services.console import sampler
from tokenbus_services.console.runs.run_table import PageView
from tokenbus_services.console.sampler import Sampler, WatchingPage
from tokenbus_services.executor import processes
from tokenbus_services.executor.processes import ExecutorProcess, Executors, NoExecutor
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.intake.run_creation import Cancels
from tokenbus_services.recorder import service as recorder
from tokenbus_services.recorder.service import RecordService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import RecordSettings, Settings
from tokenbus_services.tools.mcp import registry as announce
from tokenbus_services.tools.mcp.registry import McpLists

NOTHING: Any = None


class Defect(Exception):
    """What a programming error raises."""


class Failing:
    """Raises on each call; after `left` calls another error, which ends the loop under test if it does not end."""

    def __init__(self, error: Exception, left: int = 10 * MAX_DEFECTS) -> None:
        self._error = error
        self._left = left
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self.calls > self._left:
            raise asyncio.CancelledError
        raise self._error


@pytest.fixture(autouse=True)
def unrendered_logs() -> Iterator[None]:
    """Rendering a traceback for a terminal takes half a second."""
    with capture_logs():
        yield


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def liveness(failures: list[str]) -> Liveness:
    made = Liveness()
    made.failed_work = failures.append
    return made


async def ends(loop: Coroutine[Any, Any, None], error: type[Exception]) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(error):
            await loop


async def goes_on(loop: Coroutine[Any, Any, None], tries: Failing) -> None:
    """The loop calls `tries` until that cancels it."""
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await loop
    assert tries.calls > 2 * MAX_DEFECTS


def counter() -> SpendCounter:
    """It fails at each end of a run, because it has no server."""
    return SpendCounter(NOTHING, NOTHING, NOTHING, prices=NOTHING, apis={}, rules_of=NOTHING, keep_ms=1)


def end_of(run: str) -> Completed:
    return Completed(run=run, seq=1, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=1))


async def test_spend_of_many_runs_in_a_row_that_cannot_be_counted_ends_the_count() -> None:
    counting = counter()
    counting._failed_work = (failed := list[str]()).append
    for n in range(MAX_DEFECTS - 1):
        await counting._count_or_pass(end_of(f"run-{n}"))
    start = Started(run="another", seq=0, turn=0, attempt=0, provider="p", model="m")
    await counting._count_or_pass(start)  # only remembered, which says nothing about the count
    with pytest.raises(Exception, match="NoneType"):
        await counting._count_or_pass(end_of("last"))
    assert failed == ["count of spend"] * MAX_DEFECTS


async def test_a_single_run_whose_spend_cannot_be_counted_is_skipped() -> None:
    counting = counter()
    for _ in range(3 * MAX_DEFECTS):
        await counting._count_or_pass(end_of("run"))


async def test_spend_that_is_counted_in_between_resets_the_failures() -> None:
    counting = counter()
    counting._origins["no client's"] = None
    for n in range(3 * MAX_DEFECTS):
        await counting._count_or_pass(end_of(f"run-{n}"))
        await counting._count_or_pass(end_of("no client's"))
        counting._origins["no client's"] = None


async def test_a_renewal_of_records_that_only_fails_ends_unless_the_store_is_away(
    server_url: str, liveness: Liveness, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "RENEW_AGAIN_S", 0.0)
    service = RecordService(WorkerCore(Settings(redis_url=server_url, records=RecordSettings()), "recorder"))
    service.liveness = liveness
    try:
        monkeypatch.setattr(recorder, "drop_old_records", Failing(Defect()))
        await ends(service._renew_all(), Defect)
        assert failures == ["leases of records"] * MAX_DEFECTS
        monkeypatch.setattr(recorder, "drop_old_records", away := Failing(BlobUnavailable("put", "away")))
        await goes_on(service._renew_all(), away)
    finally:
        await service.close()


async def test_a_sweep_of_blobs_that_only_fails_ends_unless_the_store_is_away(
    liveness: Liveness, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "SWEEP_AGAIN_S", 0.0)

    def service(error: Exception) -> tuple[BlobService, Failing]:
        made = BlobService(cast("Any", SimpleNamespace(sweep=(tries := Failing(error)))), ttl_s=60.0)
        made.liveness = liveness
        return made, tries

    await ends(service(Defect())[0]._sweep(), Defect)
    assert failures == ["blob sweep"] * MAX_DEFECTS
    broken, away = service(BlobUnavailable("sweep", "away"))
    await goes_on(broken._sweep(), away)


@pytest.mark.parametrize(("others", "only_fails"), [({}, True), ({"well": [Tool(name="b")]}, False)])
async def test_lists_of_tools_that_can_never_be_written_end_the_worker_unless_others_can(
    others: dict[str, list[Tool]],
    only_fails: bool,
    liveness: Liveness,
    failures: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announce, "AGAIN_S", 0.0)
    broken = Failing(Defect())

    async def write(name: str, tools: list[Tool]) -> None:
        if name == "broken":
            broken()

    listed = asyncio.Event()
    listed.set()
    servers = SimpleNamespace(listed=listed, definitions={"broken": [Tool(name="a")], **others})
    lists = McpLists(cast("Any", servers), cast("Any", SimpleNamespace(write=write)), liveness)
    await (ends(lists._keep(), Defect) if only_fails else goes_on(lists._keep(), broken))
    assert failures == ["mcp list"] * (broken.calls if only_fails else broken.calls - 1)


async def test_a_host_that_cannot_fork_executors_ends_the_worker(
    liveness: Liveness, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CHECK_S", 0.0)
    executors = Executors("no_module", setup(WORK))
    executors._failed_work = liveness.failed_work
    monkeypatch.setattr(executors, "_fork", Failing(BlockingIOError("fork: no more processes")))
    for _ in range(MAX_DEFECTS):
        with pytest.raises(BlockingIOError):
            await executors.fork(cast("ExecutorProcess", NOTHING))
    await ends(executors._watch(), NoExecutor)
    assert failures == [processes.FORK_WORK] * MAX_DEFECTS


async def test_cancels_that_meet_a_defect_are_released_and_counted(
    keys: Keys, liveness: Liveness, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[QueueItem] = []
    cancels = Cancels(
        cast("Any", SimpleNamespace(topology="single")),
        keys,
        cast("Any", SimpleNamespace(release=released.extend)),
        liveness,
    )
    monkeypatch.setattr(cancels, "_apply", Failing(Defect()))
    item = QueueItem(keys.requests, "1-1", {b"__data__": b'{"type":"cancel","run":"r"}'}, 1)
    assert cancels.take(item)
    await asyncio.gather(*cancels._tasks.values())
    assert (released, failures) == ([item], ["cancels"])


async def test_a_console_whose_samples_fail_is_counted_and_stops_with_its_last_page(
    liveness: Liveness, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "SAMPLE_S", 0.0)
    samples = Sampler(cast("Any", SimpleNamespace()), Keys(), NOTHING, NOTHING)
    page = WatchingPage(PageView())
    tries = Failing(Defect())

    def sample() -> Any:
        if tries.calls == 2:
            samples.leave(page)
        return tries()

    monkeypatch.setattr(samples, "sample", sample)
    await samples.open(liveness)
    samples.join(page)
    assert samples._task
    async with asyncio.timeout(20):
        await samples._task
    assert failures == ["console sample"] * 3

"""One attempt: what happens to its item, its slot and its run before and around the provider call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import msgspec
import pytest

from tests.services.fetcher.limits.test_wait_queue import Hall
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, WorkQueue
from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import Ended, TurnWork, encode
from tokenbus.events.requests import Generate, Message
from tokenbus_services.endpoints.endpoint import Providers
from tokenbus_services.endpoints.limiter import Scopes
from tokenbus_services.fetcher.attempt_runner import AttemptRunner
from tokenbus_services.fetcher.calls.background_job import LeftJobs
from tokenbus_services.fetcher.image_offload import ImageStore
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.fetcher.writing.raw_writer import RawWriter
from tokenbus_services.runtime.queue_work import NotStarted
from tokenbus_services.settings import LimitSettings, ProviderSettings, Settings

RUN = "r1"


class Queue:
    """Records how items are marked and finished."""

    def __init__(self) -> None:
        self.marks: list[bool] = []
        self.finished: list[QueueItem] = []
        self.is_ours = True

    async def mark(self, item: QueueItem, *, begun: bool) -> bool:
        self.marks.append(begun)
        return self.is_ours

    async def finish(self, items: list[QueueItem], *, again: Any) -> None:
        self.finished += items


class Writer:
    """Records what attempts write, and which are closed as lost."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.closed: list[tuple[str, int, int, str]] = []
        self.lags: Any = None  # these runs have no policies, so no lag is asked for

    def attempt(self, run: str, turn: int, attempt: int, stop: object, *, held: bool) -> Any:
        return _Attempt(self, run, turn, attempt)

    async def lost(self, run: str, turn: int, attempt: int, reason: str) -> None:
        self.closed.append((run, turn, attempt, reason))


class _Attempt:
    def __init__(self, writer: Writer, run: str, turn: int, attempt: int) -> None:
        self._writer = writer
        self.run, self.turn, self.attempt = run, turn, attempt

    async def write(self, event: object) -> None:
        self._writer.events.append(event)

    async def end(self, event: Ended) -> None:
        self._writer.events.append(event)


class Media:
    """Refuses every call, so that an attempt ends before its provider is called."""

    def __init__(self) -> None:
        self.built: list[Generate] = []

    async def build(self, endpoint: object, request: Generate, history: list[Message], *, lost: object) -> Any:
        self.built.append(request)
        await asyncio.sleep(0)  # lets a deadline in the past end the build
        raise RequestInvalid("messages[0]", "too much")


async def _nothing(messages: Sequence[Message]) -> None:
    pass


class Bench:
    """A runner with a real server and a real admission."""

    def __init__(self, server: Server, keys: Keys, hall: Hall) -> None:
        self.server, self.keys, self.hall = server, keys, hall
        self.queue, self.writer, self.media = Queue(), Writer(), Media()
        providers = {"anthropic": ProviderSettings(api="anthropic", api_key_env="")}
        settings = Settings(prefix=keys.prefix, partitions=keys.partitions, providers=providers)
        self.runner = AttemptRunner(
            server,
            keys,
            cast("WorkQueue", self.queue),
            cast("RawWriter", self.writer),
            Providers(settings),
            media=cast("TurnMedia", self.media),
            admission=hall.admission,
            scopes=Scopes(LimitSettings(), keys),
            images=cast("ImageStore", None),
            answer_bytes=1 << 20,
            stop=lambda item: None,
            keep=_nothing,
            left=LeftJobs(server, keys, Providers(settings)),
            retry=settings.retry,
        )

    async def accept(self, *, status: str = "open", attempt: int = 1, **fields: str) -> None:
        """The run's hash, as intake and the parser write it."""
        request = {"provider": "anthropic", "model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        mapping = {"status": status, "attempt": attempt, "request": msgspec.json.encode(request), **fields}
        await self.server.client.hset(self.keys.run(RUN), mapping=mapping)
        await self.server.client.pexpire(self.keys.run(RUN), 60_000)

    def item(self, *, deliveries: int = 1, begun: bool = False, attempt: int = 1, not_before_ms: int = 0) -> QueueItem:
        work = TurnWork(RUN, 0, attempt, not_before_ms)
        return QueueItem("turns", "1-0", {RUN.encode(): encode(work)}, deliveries, begun)

    @property
    def errors(self) -> list[str]:
        ended = [event for event in self.writer.events if isinstance(event, Ended)]
        return [event.error.code for event in ended if event.error]


@pytest.fixture
async def bench(server: Server, keys: Keys) -> AsyncGenerator[Bench]:
    hall = Hall(longest_wait_s=0.05)
    await hall.admission.open()
    bench = Bench(server, keys, hall)
    yield bench
    await hall.admission.close()


async def test_an_item_that_another_worker_had_begun_is_closed_as_lost_and_not_called(bench: Bench) -> None:
    await bench.accept()
    await bench.runner.work(bench.item(deliveries=2, begun=True))
    assert bench.writer.closed == [(RUN, 0, 1, "the fetcher was lost")]
    assert not bench.media.built


async def test_an_item_whose_worker_was_lost_before_it_began_is_called(bench: Bench) -> None:
    await bench.accept()
    await bench.runner.work(bench.item(deliveries=2))
    assert not bench.writer.closed
    assert len(bench.media.built) == 1


async def test_an_item_that_never_began_with_two_workers_is_closed_as_lost_because_it_may_kill_them(
    bench: Bench,
) -> None:
    await bench.accept()
    await bench.runner.work(bench.item(deliveries=3))
    assert bench.writer.closed == [(RUN, 0, 1, "the fetcher was lost")]
    assert not bench.media.built


async def test_an_item_that_is_abandoned_is_closed_before_it_is_finished(bench: Bench) -> None:
    item = bench.item()
    await bench.runner.abandon(item)
    assert bench.writer.closed == [(RUN, 0, 1, "the fetcher stopped")]
    assert bench.queue.finished == [item]


async def test_a_call_that_cannot_be_built_ends_the_attempt_and_returns_its_slot(bench: Bench) -> None:
    await bench.accept()
    await bench.runner.work(bench.item())
    assert [request.model for request in bench.media.built] == ["m"]
    assert bench.errors == ["request_invalid"]
    assert bench.hall.admission.running == 0
    assert bench.queue.marks == [True]


@pytest.mark.parametrize(
    "state",
    [{"status": "completed"}, {"attempt": 2}, {"closed": "1"}],
    ids=["its run has ended", "a newer attempt has begun", "the parser closed it"],
)
async def test_an_attempt_that_is_over_makes_no_call(bench: Bench, state: dict[str, Any]) -> None:
    await bench.accept(**state)
    await bench.runner.work(bench.item())
    assert not bench.media.built
    assert not bench.writer.events
    assert bench.hall.admission.running == 0


async def test_a_retry_is_marked_as_not_begun_while_it_waits_and_as_begun_before_its_call(bench: Bench) -> None:
    await bench.accept()
    await bench.runner.work(bench.item(not_before_ms=bench.server.clock.now_ms() + 20))
    assert bench.queue.marks == [False, True]
    assert len(bench.media.built) == 1


async def test_a_retry_waits_no_longer_than_its_runs_deadline(bench: Bench) -> None:
    now_ms = bench.server.clock.now_ms()
    await bench.accept(deadline=str(now_ms))
    await bench.runner.work(bench.item(not_before_ms=now_ms + 3_600_000))
    assert bench.errors == ["deadline"]


async def test_a_run_that_another_worker_took_while_it_waited_is_not_called_and_holds_no_slot(bench: Bench) -> None:
    await bench.accept()
    bench.queue.is_ours = False
    await bench.runner.work(bench.item(not_before_ms=1))
    assert not bench.media.built
    assert bench.hall.admission.running == 0


async def test_a_run_without_a_free_slot_ends_after_the_longest_wait(bench: Bench) -> None:
    await bench.accept()
    bench.hall.arrive("other")
    await eventually(lambda: bench.hall.admission.running == 1)
    await bench.runner.work(bench.item())
    assert bench.errors == ["limit_wait"]
    assert bench.queue.marks == [False, True], "its end is written by the worker that owns it"
    assert not bench.media.built


async def test_a_run_that_waits_while_its_fetcher_closes_goes_to_another_worker_as_not_started(bench: Bench) -> None:
    await bench.accept()
    await bench.hall.admission.close()
    with pytest.raises(NotStarted):
        await bench.runner.work(bench.item(not_before_ms=bench.server.clock.now_ms() + 3_600_000))
    assert not bench.writer.events

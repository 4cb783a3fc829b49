"""Who owns which partition: fair shares, takeover, hand-over, and never two whose writes both count (guarantee 2)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tests.contract.bus.faults import Gate
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease, Leases, partition_share
from tokenbus.bus.liveness import STUCK_S, Liveness
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

TTL_S = 0.4
TICK_S = 0.03


class Worker:
    """One worker's leases, and the callbacks that it received."""

    def __init__(self, server: Server, keys: Keys, name: str, **options: Any) -> None:
        quick: dict[str, Any] = {"ttl_s": TTL_S, "tick_s": TICK_S}
        self.taken: list[Lease] = []
        self.gone: list[int] = []
        self.before_gone: Callable[[int], Awaitable[None]] | None = None
        self.leases = Leases(
            server,
            keys,
            group="g",
            topic="raw",
            worker=name,
            on_acquired=self.taken.append,
            on_revoked=self._gone,
            **quick | options,
        )

    async def _gone(self, partition: int) -> None:
        if self.before_gone:
            await self.before_gone(partition)
        self.gone.append(partition)

    @property
    def held(self) -> set[int]:
        return set(self.leases.owned)


@asynccontextmanager
async def running(worker: Worker) -> AsyncGenerator[Worker]:
    await worker.leases.open()
    try:
        yield worker
    finally:
        await worker.leases.close()


def shared_out(workers: list[Worker], partitions: int) -> bool:
    """Each partition has one owner, and no worker has two more than another."""
    sizes = [len(w.held) for w in workers]
    owners = Counter(p for w in workers for p in w.held)
    return owners == Counter(range(partitions)) and max(sizes) - min(sizes) <= 1


@pytest.fixture
async def other_server(server: Server) -> AsyncGenerator[Server]:
    """A second connection, for a worker that is to be frozen."""
    async with Server(server.url) as other:
        yield other


async def test_one_worker_takes_all(server: Server, keys: Keys):
    async with running(Worker(server, keys, "a")) as a:
        assert a.held == {0, 1, 2, 3}
        assert [lease.offset for lease in a.taken] == ["0-0"] * 4


@pytest.mark.parametrize("partitions", [1, 8])
async def test_shares_stay_fair_while_workers_join_and_leave(server: Server, keys: Keys, partitions: int):
    keys = Keys(keys.prefix, partitions)
    async with AsyncExitStack() as stack:
        workers = [Worker(server, keys, f"w{i}") for i in range(partitions + 3)]
        for joined, worker in enumerate(workers, 1):
            await stack.enter_async_context(running(worker))
            await eventually(lambda joined=joined: shared_out(workers[:joined], partitions))
        while len(workers) > 1:
            await workers.pop(0).leases.close()
            await eventually(lambda: shared_out(workers, partitions))


async def test_workers_that_start_at_the_same_moment_settle(server: Server, keys: Keys):
    keys = Keys(keys.prefix, 8)
    workers = [Worker(server, keys, f"w{i}") for i in range(5)]
    names = [f"w{i}" for i in range(5)]
    due = [partition_share(name, names, 8) for name in names]
    await asyncio.gather(*(worker.leases.open() for worker in workers))
    await eventually(lambda: shared_out(workers, 8) and [len(worker.held) for worker in workers] == due)
    settled = [worker.held for worker in workers]
    begin = asyncio.get_running_loop().time()
    await eventually(lambda: asyncio.get_running_loop().time() > begin + 5 * TICK_S)
    assert [worker.held for worker in workers] == settled
    await asyncio.gather(*(worker.leases.close() for worker in workers))


async def test_a_partition_is_released_only_after_its_running_work(server: Server, keys: Keys):
    async with running(Worker(server, keys, "a")) as a:
        await eventually(lambda: len(a.held) == 4)
        may_go = asyncio.Event()
        requested: list[int] = []

        async def finish(partition: int) -> None:
            requested.append(partition)
            await may_go.wait()

        a.before_gone = finish
        async with running(Worker(server, keys, "b", ttl_s=5.0)) as b:
            await eventually(lambda: requested)
            for _ in range(3):
                await run_script(server, scripts.present(keys.members("g"), member="b", ttl_ms=5000))
            assert b.held == set()
            may_go.set()
            await eventually(lambda: shared_out([a, b], 4))
            assert set(a.gone) == b.held


async def test_a_silent_death_is_followed_when_its_leases_have_run_out(
    server: Server, other_server: Server, keys: Keys
):
    gate = Gate(other_server)
    dead = Worker(other_server, keys, "dead")
    async with running(dead), running(Worker(server, keys, "b")) as b:
        await eventually(lambda: shared_out([dead, b], 4))
        gate.shut()
        await eventually(lambda: len(b.held) == 4)
        gate.open()


async def test_a_closed_workers_partitions_are_taken_before_its_leases_run_out(server: Server, keys: Keys):
    async with running(Worker(server, keys, "b", ttl_s=3600.0)) as b, AsyncExitStack() as stack:
        a = await stack.enter_async_context(running(Worker(server, keys, "a", ttl_s=3600.0)))
        await eventually(lambda: shared_out([a, b], 4))
        await a.leases.close()
        await eventually(lambda: len(b.held) == 4)


async def test_a_frozen_worker_that_resumes_has_lost_its_partitions(server: Server, other_server: Server, keys: Keys):
    gate = Gate(other_server)
    frozen = Worker(other_server, keys, "frozen")
    async with running(frozen):
        held = frozen.held
        gate.shut()
        async with running(Worker(server, keys, "b")) as b:
            await eventually(lambda: len(b.held) == 4)
            gate.open()
            await eventually(lambda: set(frozen.gone) == held)
            await eventually(lambda: shared_out([frozen, b], 4))


async def test_no_token_is_given_twice(server: Server, keys: Keys):
    everybody: list[Worker] = []
    for round_ in range(3):
        workers = [Worker(server, keys, f"w{round_}{i}", ttl_s=0.1, tick_s=0.005) for i in range(3)]
        everybody += workers
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(running(worker))
            await eventually(lambda workers=workers: shared_out(workers, 4))
    tokens = Counter((lease.partition, lease.token) for w in everybody for lease in w.taken)
    assert len(tokens) >= 12
    assert set(tokens.values()) == {1}


async def test_a_worker_that_asked_for_a_lease_and_got_no_reply_has_it_the_next_time(server: Server, keys: Keys):
    worker = Worker(server, keys, "a")
    call = scripts.acquire(keys.lease(2, "g"), keys.topic(2, "raw"), owner="a", ttl_ms=60_000)
    await run_script(server, call)
    async with running(worker):
        assert worker.held == {0, 1, 2, 3}


async def test_a_forgotten_partition_comes_back_unless_it_is_shunned(server: Server, keys: Keys):
    async with running(Worker(server, keys, "a")) as a:
        a.leases.forget(1, retry_s=60)
        a.leases.forget(2)
        await eventually(lambda: a.held == {0, 2, 3})
        async with running(Worker(server, keys, "b")) as b:
            await eventually(lambda: 1 in b.held)


async def test_shares_settle_again_after_the_server_lost_its_data(server: Server, keys: Keys):
    async with running(Worker(server, keys, "a")) as a, running(Worker(server, keys, "b")) as b:
        await eventually(lambda: shared_out([a, b], 4))
        before = {(lease.partition, lease.token) for w in (a, b) for lease in w.taken}
        names = [keys.members("g"), *(keys.lease(p, "g") for p in range(4))]
        await server.client.delete(*names)

        def settled_anew() -> bool:
            leases = {(lease.partition, lease.token) for w in (a, b) for lease in w.leases.owned.values()}
            return shared_out([a, b], 4) and not before & leases

        await eventually(settled_anew)


async def test_one_bad_tick_does_not_end_a_worker(server: Server, keys: Keys, caplog: pytest.LogCaptureFixture):
    async with running(Worker(server, keys, "a")) as a:

        async def fail(partition: int) -> None:
            a.before_gone = None
            raise LookupError(partition)

        a.before_gone = fail
        await server.client.hset(keys.lease(0, "g"), "token", 1)
        await eventually(lambda: "LookupError" in caplog.text)
        await eventually(lambda: a.leases.healthy and a.held == {0, 1, 2, 3})


async def test_closing_ends_even_if_nothing_answers(server: Server, other_server: Server, keys: Keys):
    gate = Gate(other_server)
    worker = Worker(other_server, keys, "a")
    await worker.leases.open()
    gate.shut()
    await worker.leases.close()  # for good: the gate stays shut
    assert worker.held == set()


async def test_a_connection_that_broke_unnoticed_does_not_keep_the_leases_from_others(
    server: Server, other_server: Server, keys: Keys
):
    worker = Worker(other_server, keys, "a", ttl_s=60.0)
    await worker.leases.open()
    command, broken = other_server.client.execute_command, Counter[str]()

    async def broken_at_first(name: str, *args: Any, **options: Any) -> Any:
        broken[name] += 1
        if broken[name] == 1:
            raise ConnectionLost("broken since long")
        return await command(name, *args, **options)

    other_server.client.execute_command = broken_at_first
    await worker.leases.close()
    async with running(Worker(server, keys, "b")) as b:
        assert b.held == {0, 1, 2, 3}


async def test_dead_members_are_not_counted(server: Server, keys: Keys):
    await server.client.zadd(keys.members("g"), {f"dead{i}": 1 for i in range(50)})
    async with running(Worker(server, keys, "a")) as a:
        assert len(a.held) == 4


async def test_a_worker_that_has_failed_renews_nothing_more(server: Server, keys: Keys):
    liveness = Liveness()
    async with running(Worker(server, keys, "a", liveness=liveness)) as a:
        await eventually(lambda: len(a.held) == keys.partitions)
        liveness.failed = True  # the supervisor, before the worker hands over
        async with running(Worker(server, keys, "b")) as b:  # beside one that works it would get half
            await eventually(lambda: len(b.held) == keys.partitions)


async def test_a_stalled_membership_check_is_noticed(server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch):
    liveness = Liveness()
    async with running(Worker(server, keys, "a", liveness=liveness)) as worker:

        async def never() -> list[str]:
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr(worker.leases, "_count", never)

        def stands_still() -> bool:
            liveness.elapsed_s += 1.0
            return any(task.name == "members of g" and task.still_s > STUCK_S for task in liveness.tasks)

        await eventually(stands_still)

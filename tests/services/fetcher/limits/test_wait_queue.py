"""Whose turn it is: tenants in turn, each limit for itself, and a place for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from tests.waiting import eventually
from tokenbus.bus.scripts.limits import Scope
from tokenbus_services.endpoints.limiter import (
    Limiter,
    LimitRefusal,
    Reservation,
    ReservationRequest,
)
from tokenbus_services.fetcher.limits.wait_queue import AdmissionMetrics, FairQueue, WaitedTooLong
from tokenbus_services.runtime.queue_work import NotStarted

MODEL = Scope("model", "limits:model:m")
OTHER = Scope("model", "limits:model:other")


class Server:
    """A stand-in for the limits on the server: refuses the given scopes and records each call."""

    def __init__(self) -> None:
        self.closed: dict[Scope, float] = {}
        """Scopes that refuse, each with the wait that it reports."""
        self.settled: list[tuple[str, int | None]] = []
        self.requested: list[str] = []
        self.broken: str | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def reserve(self, request: ReservationRequest) -> Reservation | LimitRefusal:
        self.requested.append(request.call)
        await self.answers.wait()
        if request.call == self.broken:
            raise RuntimeError("no permission")
        for scope in request.scopes:
            if scope in self.closed:
                return LimitRefusal(scope, self.closed[scope])
        return Reservation(request, (0,) * len(request.scopes))

    def refund(self, grant: Reservation, used: int | None) -> None:
        self.settled.append((grant.request.call, used))


class Hall:
    """An admission, and in which order it let in whom."""

    def __init__(self, *, slots: int = 1, places: int = 100, longest_wait_s: float = 3600.0) -> None:
        self.server = Server()
        self.registry = CollectorRegistry()
        self.admission = FairQueue(
            cast("Limiter", self.server),
            AdmissionMetrics(self.registry),
            slots=slots,
            places=places,
            longest_wait_s=longest_wait_s,
        )
        self.entered: list[str] = []
        self.grants: dict[str, Reservation] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def arrive(self, call: str, *scopes: Scope, tenant: str = "", provider: str = "") -> asyncio.Task[None]:
        self.tasks[call] = asyncio.create_task(self._wait(ReservationRequest(call, tenant, scopes, 0, provider)))
        return self.tasks[call]

    async def _wait(self, request: ReservationRequest) -> None:
        with self.admission.arriving(request.tenant):
            grant = self.admission.enter_at_once(request) or await self.admission.enter(request)
        self.entered.append(request.call)
        self.grants[request.call] = grant

    async def all_wait(self, count: int) -> None:
        await eventually(lambda: self.admission.waiting == count)

    async def leave(self, call: str) -> None:
        """The call ends; returns when the next one is in."""
        before = len(self.entered)
        self.admission.leave(self.grants[call], used=None)
        await eventually(lambda: len(self.entered) > before)


@pytest.fixture
async def hall() -> AsyncGenerator[Hall]:
    hall = Hall()
    await hall.admission.open()
    yield hall
    await hall.admission.close()
    await asyncio.gather(*hall.tasks.values(), return_exceptions=True)


async def test_a_run_that_nothing_limits_enters_without_asking_the_server(hall: Hall) -> None:
    await hall.arrive("a")
    assert hall.entered == ["a"]
    assert hall.server.requested == []
    assert hall.admission.running == 1


async def test_one_run_of_a_tenant_does_not_wait_behind_the_many_of_another(hall: Hall) -> None:
    await hall.arrive("first", tenant="flood")
    for n in range(30):
        hall.arrive(f"f{n}", tenant="flood")
    await hall.all_wait(30)
    hall.arrive("single", tenant="small")
    await hall.all_wait(31)
    await hall.leave("first")
    await hall.leave(hall.entered[-1])
    assert "single" in hall.entered[:3], "its turn comes after one of the other's at the most"


async def test_tenants_take_turns_and_each_keeps_its_order(hall: Hall) -> None:
    await hall.arrive("x")
    for call, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")):
        hall.arrive(call, tenant=tenant)
    await hall.all_wait(6)
    await hall.leave("x")
    for _ in range(5):
        await hall.leave(hall.entered[-1])
    assert hall.entered == ["x", "a1", "b1", "c1", "a2", "b2", "a3"]


@pytest.mark.parametrize("kind", ["tenant", "provider"])
async def test_who_has_less_than_a_share_of_the_slots_enters_though_another_has_taken_them_all(kind: str) -> None:
    hall = Hall(slots=4)
    await hall.admission.open()
    for n in range(8):
        hall.arrive(f"greedy{n}", **{kind: "greedy"})
    await hall.all_wait(4)
    for n in range(3):
        hall.arrive(f"modest{n}", **{kind: "modest"})
    await eventually(lambda: len(hall.entered) == 6)
    assert hall.entered[4:] == ["modest0", "modest1"], "half of the slots is its share"
    await hall.leave("modest0")
    assert hall.entered[-1] == "modest2"
    hall.admission.leave(hall.grants["greedy0"], used=None)
    await eventually(lambda: hall.admission.running == 5)
    assert hall.entered[-1] == "modest2", "while more than the slots run, nobody beyond a share enters"
    await hall.admission.close()
    await asyncio.gather(*hall.tasks.values(), return_exceptions=True)


async def test_a_limit_that_refuses_delays_only_its_own_runs(hall: Hall) -> None:
    hall.server.closed[MODEL] = 3600.0
    hall.arrive("held", MODEL)
    await eventually(lambda: hall.server.requested == ["held"])
    await hall.arrive("free", OTHER)
    assert hall.entered == ["free"]
    hall.arrive("held too", MODEL)
    await hall.all_wait(2)
    assert hall.server.requested == ["held", "free"], "what was refused is not asked for again before its time"


async def test_a_run_that_was_refused_asks_again_when_its_time_has_come(hall: Hall) -> None:
    hall.server.closed[MODEL] = 0.001
    hall.arrive("a", MODEL)
    await eventually(lambda: len(hall.server.requested) > 1)
    del hall.server.closed[MODEL]
    await eventually(lambda: hall.entered == ["a"])
    refused = hall.registry.get_sample_value("tokenbus_calls_refused_total", {"limit": "model"})
    assert refused
    assert hall.registry.get_sample_value("tokenbus_calls_granted_total") == 1


async def test_the_end_of_a_call_lets_the_next_of_its_limit_ask_at_once() -> None:
    hall = Hall(slots=2)
    await hall.admission.open()
    await hall.arrive("a", MODEL)
    hall.server.closed[MODEL] = 3600.0
    hall.arrive("b", MODEL)
    await eventually(lambda: hall.server.requested == ["a", "b"])
    hall.server.closed.clear()
    await hall.leave("a")
    assert hall.entered == ["a", "b"]
    await hall.admission.close()


async def test_a_waiter_that_leaves_blocks_no_other(hall: Hall) -> None:
    await hall.arrive("a")
    gone = hall.arrive("gone")
    hall.arrive("next")
    await hall.all_wait(2)
    gone.cancel()
    await hall.leave("a")
    assert hall.entered == ["a", "next"]
    assert hall.admission.waiting == 0


@pytest.mark.parametrize("scopes", [(), (MODEL,)])
async def test_a_waiter_that_leaves_as_its_turn_comes_blocks_no_other(hall: Hall, scopes: tuple[Scope, ...]) -> None:
    await hall.arrive("a", *scopes)
    gone = hall.arrive("gone", *scopes)
    hall.arrive("next", *scopes)
    await hall.all_wait(2)
    hall.admission.leave(hall.grants["a"], used=None)
    gone.cancel()
    await eventually(lambda: hall.entered == ["a", "next"])
    assert hall.admission.waiting == 0
    assert hall.admission.running == 1


async def test_a_grant_that_arrives_too_late_is_returned(hall: Hall) -> None:
    hall.server.answers.clear()
    task = hall.arrive("a", MODEL)
    await eventually(lambda: hall.server.requested == ["a"])
    task.cancel()
    hall.server.answers.set()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: hall.server.settled == [("a", 0)])
    assert hall.admission.running == 0
    await hall.arrive("b")


async def test_an_error_of_one_runs_limits_is_that_runs_alone(hall: Hall) -> None:
    hall.server.broken = "a"
    with pytest.raises(RuntimeError, match="no permission"):
        await hall.arrive("a", MODEL)
    await hall.arrive("b", MODEL)
    assert hall.entered == ["b"]


async def test_a_wait_has_an_end() -> None:
    hall = Hall(longest_wait_s=0.01)
    await hall.admission.open()
    hall.server.closed[MODEL] = 3600.0
    with pytest.raises(WaitedTooLong):
        await hall.arrive("a", MODEL)
    assert hall.admission.waiting == 0
    await hall.admission.close()


async def test_at_a_shutdown_all_waiting_runs_are_released_and_none_is_admitted(hall: Hall) -> None:
    await hall.arrive("a")
    waiting = hall.arrive("b")
    sleeping = asyncio.create_task(hall.admission.sleep(3600))
    await hall.all_wait(1)
    await hall.admission.close()
    later = hall.arrive("c", MODEL)
    for task in cast("tuple[asyncio.Task[Any], ...]", (waiting, sleeping, later)):
        with pytest.raises(NotStarted):
            await task
    assert hall.admission.running == 1, "running calls continue"


async def test_however_many_wait_there_is_a_place_for_a_further_tenant() -> None:
    hall = Hall(places=100)
    held: list[Any] = []
    for tenant in ("a", "b", "c", "d"):
        while hall.admission.has_place(tenant):
            arrival = hall.admission.arriving(tenant)
            arrival.__enter__()
            held.append(arrival)
    assert len(held) < 100
    assert hall.admission.has_place("e")
    for arrival in held:
        arrival.__exit__(None, None, None)
    assert hall.admission.waiting == 0

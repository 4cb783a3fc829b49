"""How many calls of policies run at once, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.waiting import eventually
from tokenbus_services.policy_stage.calls import FairSemaphore


class Calls:
    """Calls that acquire a slot and keep it until the test releases them."""

    def __init__(self, seats: FairSemaphore) -> None:
        self.seats = seats
        self.seated: list[str] = []
        self.reported: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._go: dict[str, asyncio.Event] = {}

    def call(self, run: str, name: str) -> None:
        self._go[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._sit(run, name))

    async def done(self, name: str) -> None:
        self._go[name].set()
        await self.tasks[name]

    async def _sit(self, run: str, name: str) -> None:
        async with self.seats.slot(run, lambda: self.reported.append(run)):
            self.seated.append(name)
            await self._go[name].wait()


@asynccontextmanager
async def calls(most: int, *, report_waiting_s: float = 60) -> AsyncGenerator[Calls]:
    made = Calls(FairSemaphore(most, report_waiting_s=report_waiting_s))
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    assert made.seats.waiting == 0


async def test_no_more_calls_run_at_once_than_there_are_seats() -> None:
    async with calls(2) as made:
        for n in range(5):
            made.call(f"r{n}", f"r{n}")
        await eventually(lambda: made.seats.waiting == 3)
        assert made.seated == ["r0", "r1"]
        await made.done("r1")
        await eventually(lambda: made.seated == ["r0", "r1", "r2"])


async def test_a_run_with_many_calls_takes_turns_with_a_run_with_few() -> None:
    async with calls(1) as made:
        for n in range(4):
            made.call("many", f"many {n}")
        await eventually(lambda: made.seats.waiting == 3)
        made.call("few", "few 0")
        await eventually(lambda: made.seats.waiting == 4)
        order = ["many 0", "many 1", "few 0", "many 2", "many 3"]
        for n, name in enumerate(order):
            await eventually(lambda n=n: len(made.seated) == n + 1)
            await made.done(name)
        assert made.seated == order


async def test_a_call_that_is_given_up_leaves_its_place_to_the_next() -> None:
    async with calls(1) as made:
        for name in ("first", "second", "third"):
            made.call(name, name)
        await eventually(lambda: made.seats.waiting == 2)
        made.tasks["second"].cancel()
        await made.done("first")
        await eventually(lambda: made.seated == ["first", "third"])
        await made.done("third")
        made.call("fourth", "fourth")
        await eventually(lambda: made.seated[-1] == "fourth")


async def test_a_slot_granted_during_a_cancel_goes_to_the_next_waiter() -> None:
    async with calls(1) as made:
        for name in ("first", "second", "third"):
            made.call(name, name)
        await eventually(lambda: made.seats.waiting == 2)
        made.tasks["first"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await made.tasks["first"]  # its seat is second's by now, who does not know it yet
        made.tasks["second"].cancel()
        await eventually(lambda: made.seated[-1] == "third")


async def test_a_waiting_call_reports_that_it_is_alive() -> None:
    async with calls(1, report_waiting_s=0.01) as made:
        made.call("first", "first")
        made.call("second", "second")
        await eventually(lambda: len(made.reported) > 2)
        assert set(made.reported) == {"second"}

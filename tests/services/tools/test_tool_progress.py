"""What tools report of their progress: sent while the call runs, the latest only, and never in its way."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.services.tools import sample_tools
from tests.services.tools.conftest import MakeExecutor, call, until
from tokenbus.events.frames import ToolReported
from tokenbus_services.tools import progress
from tokenbus_services.tools.progress import MESSAGE_CHARS, Reporter


class Subscriber:
    """Takes one report at a time, once it is let."""

    def __init__(self) -> None:
        self.reports: list[ToolReported] = []
        self.free = asyncio.Event()
        self.free.set()

    async def deliver(self, report: ToolReported) -> None:
        self.reports.append(report)
        await self.free.wait()


@pytest.fixture(autouse=True)
def no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "GAP_S", 0)
    sample_tools.release.clear()


@pytest.mark.parametrize("name", ["reports_in_loop", "reports_in_thread"])
async def test_a_python_tool_may_report_by_its_context(run: MakeExecutor, name: str) -> None:
    there = Subscriber()
    running = asyncio.create_task(run(name, env={"KEY": "very-secret"}).execute(call(name), there.deliver))
    await until(lambda: bool(there.reports))
    sample_tools.release.set()
    assert (await running).content == "done"
    assert there.reports == [ToolReported(3, 0.5, 1, "half, [redacted]")]


async def test_only_the_latest_update_is_kept_while_one_is_being_sent() -> None:
    there = Subscriber()
    there.free.clear()
    with Reporter(3, there.deliver, str) as reporter:
        reporter.report(0)
        await until(lambda: len(there.reports) == 1)
        for step in range(1, 1000):
            reporter.report(step)
        there.free.set()
        await until(lambda: len(there.reports) == 2)
    assert [r.progress for r in there.reports] == [0, 999]


async def test_what_is_not_sent_when_the_call_ends_is_dropped() -> None:
    there = Subscriber()
    there.free.clear()
    with Reporter(3, there.deliver, str) as reporter:
        reporter.report(1)
        await until(lambda: bool(there.reports))
        reporter.report(2)
    reporter.report(3)
    [sending] = [task for task in asyncio.all_tasks() if task.get_name() == "tool progress"]
    await asyncio.wait({sending})
    assert [r.progress for r in there.reports] == [1]


async def test_a_report_that_cannot_be_sent_is_lost_and_the_next_one_is_not() -> None:
    tried: list[float] = []

    async def away(report: ToolReported) -> None:
        tried.append(report.progress)
        raise ConnectionError("the server is away")

    with Reporter(3, away, str) as reporter:
        reporter.report(1)
        await until(lambda: tried == [1])
        reporter.report(2)
        await until(lambda: tried == [1, 2])


@pytest.mark.parametrize(
    ("report", "sent"),
    [
        ((1, math.nan, ""), ToolReported(3, 1.0)),
        ((-1, math.inf, "\ud800"), ToolReported(3, -1.0, None, "?")),
        ((0, 0, "x" * 1000), ToolReported(3, 0.0, 0.0, "x" * MESSAGE_CHARS)),
        ((math.nan, 1, "a"), None),
        ((10**400, 1, "a"), None),
        (("half", 1, "a"), None),
        ((1, 1, 5), None),
    ],
)
async def test_a_report_is_made_fit_for_the_bus_or_dropped(
    report: tuple[float, float, str], sent: ToolReported | None
) -> None:
    there = Subscriber()
    with Reporter(3, there.deliver, lambda text: text[:]) as reporter:
        reporter.report(*report)
        await until(lambda: reporter._latest is None)  # pyright: ignore[reportPrivateUsage]
        reporter.report(9)
        await until(lambda: bool(there.reports) and there.reports[-1].progress == 9)
    assert there.reports[:-1] == ([sent] if sent else [])

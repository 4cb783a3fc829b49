"""Which runs are quiet, in which order a page shows them, and which of them it finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_index import Summary
from tokenbus.bus.server.server import Server
from tokenbus.events.run_info import RunInfo
from tokenbus_services.console.runs.last_times import LastTimes
from tokenbus_services.console.runs.run_table import KnownRun, PageView, RunTable, view_of
from tokenbus_services.gateway.problem import Refusal

VIEWER: Any = SimpleNamespace(tenant=None, may=lambda role: False)


def known(run: str, accepted_ms: int, *, said_ms: int, looked_ms: int, **facts: Any) -> KnownRun:
    info = RunInfo(**{"run": run, "state": "running", "accepted_ms": accepted_ms, "events": 5, **facts})
    made = KnownRun(Summary(info=info, judging_ms=None))
    made.said_ms = said_ms
    made.update(Summary(info=info, judging_ms=None), 0.0, looked_ms)
    return made


def order(runs: list[KnownRun], sort: str) -> list[str]:
    table = RunTable(*[None] * 3, clock=lambda: 0.0)  # type: ignore[arg-type]
    table._open = {each.info.run: each for each in runs}
    view = view_of({"sort": sort}, VIEWER)
    return [each.info.run for each in table._open_for(view)]


def test_quiet_runs_come_first_by_their_silence_and_those_that_wait_for_somebody_do_not() -> None:
    at = 1_000_000
    runs = [
        known("old", at - 900_000, said_ms=at - 10, looked_ms=at),
        known("new", at - 1_000, said_ms=at - 10, looked_ms=at),
        known("quiet", at - 500_000, said_ms=at - 40_000, looked_ms=at),
        known("stuck", at - 400_000, said_ms=at - 240_000, looked_ms=at),
        known("asks", at - 300_000, said_ms=at - 240_000, looked_ms=at, state="waiting"),
    ]
    assert order(runs, "") == ["stuck", "quiet", "new", "asks", "old"]
    assert order(runs, "newest") == ["new", "asks", "stuck", "quiet", "old"]
    assert order(runs, "longest") == ["old", "quiet", "stuck", "asks", "new"]
    assert [run.quiet_ms for run in runs] == [None, None, 40_000, 240_000, None]


def test_a_new_event_ends_the_silence_and_so_does_the_end() -> None:
    run = known("r", 0, said_ms=0, looked_ms=60_000)
    assert run.quiet_ms == 60_000
    spoken = RunInfo(run="r", state="running", accepted_ms=0, events=6)
    run.update(Summary(info=spoken, judging_ms=None), 1.0, 61_000)
    assert run.quiet_ms is None
    run.update(Summary(info=spoken, judging_ms=None), 2.0, 99_000)
    assert run.quiet_ms == 38_000
    over = RunInfo(run="r", state="completed", accepted_ms=0, ended_ms=99_500, events=6)
    run.update(Summary(info=over, judging_ms=None), 3.0, 200_000)
    assert run.quiet_ms is None


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, {"stop", "length", "open"}),
        ({"finish": "length"}, {"length"}),
        ({"q": "LENGTH"}, {"length"}),
        ({"since": "2000"}, {"length", "open"}),
        ({"until": "1500"}, {"stop", "length"}),
        ({"since": "1200", "until": "1900"}, {"length"}),
        ({"since": "9000"}, {"open"}),
    ],
)
def test_runs_are_found_by_finish_and_by_the_time_in_which_they_were_open(
    query: dict[str, str], found: set[str]
) -> None:
    runs = [
        known("stop", 500, said_ms=0, looked_ms=0, state="completed", finish="stop", ended_ms=1000),
        known("length", 1000, said_ms=0, looked_ms=0, state="completed", finish="length", ended_ms=3000),
        known("open", 2000, said_ms=0, looked_ms=0),
    ]
    view = view_of(query, VIEWER)
    assert {run.info.run for run in runs if view.matches(run, 10_000)} == found


@pytest.mark.parametrize("query", [{"sort": "best"}, {"since": "now"}, {"until": "-1"}, {"since": "1" * 16}])
def test_a_wrong_view_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(Refusal):
        view_of(query, VIEWER)


def test_a_view_without_filters_is_the_default() -> None:
    assert view_of({}, VIEWER) == PageView()


async def test_the_ends_of_the_topics_say_when_a_run_said_something_last(server: Server, keys: Keys) -> None:
    for at_ms, topic, run in ((1000, "runs", "a"), (2000, "chunks", "b"), (3000, "chunks", "a"), (4000, "blocks", "b")):
        data = b'{"type":"chunk","run":"%s","seq":1}' % run.encode()
        await server.client.xadd(keys.topic(0, topic), {"__data__": data}, id=f"{at_ms}-0")  # type: ignore[arg-type]
    times = LastTimes()
    await times.read(server, keys)

    def last(run: str, **facts: Any) -> int:
        info = RunInfo(**{"run": run, "state": "running", "accepted_ms": 500, "events": 5, **facts})
        return times.of(info, 0, 10**15)

    assert (last("a"), last("b")) == (3000, 4000)
    assert last("c") == 4000, "not at the topics' ends: it is quiet at least since these begin"
    assert last("c", events=0) == 500
    assert last("new", accepted_ms=10**14) == 10**15, "what begins later is seen from its beginning"

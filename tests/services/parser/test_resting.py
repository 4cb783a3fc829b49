"""Which runs the parser looks at to put them away: those that have waited for long enough, and no others."""

from __future__ import annotations

import pytest

from tests.unit.core.run.script import accepted, call
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.core.run.state import RunState
from tokenbus.events import normalized as n
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, PutAway, ToolWaits, WaitDecided, encode
from tokenbus_services.parser import logic
from tokenbus_services.parser.logic import ParserLogic


@pytest.fixture
def parser() -> ParserLogic:
    return ParserLogic(0, Keys("resting", 1), topics=(), lifetimes=RunLifetimes(1000, 1000, 1000))


def waits(parser: ParserLogic, run: str, at_ms: int) -> None:
    """The run waits for leave since then."""
    begun = accepted(waits={"f": ToolWaits([{}], approval_ms=60_000)}, tools=["f"])
    parser.apply(run, encode(EventFrame(0, CONTROL_ATTEMPT, at_ms, [begun])))
    parser.apply(run, encode(EventFrame(0, 1, at_ms, [*call(0, "c", "f", "{}"), n.Done("tool_use")])))


def found(parser: ParserLogic, until_ms: int) -> str | None:
    s = parser.next_resting(until_ms)
    return s.run if s else None


def test_the_run_that_waits_for_longest_comes_first(parser: ParserLogic) -> None:
    for at_ms, run in enumerate("abc", 10):
        waits(parser, run, at_ms)
    assert found(parser, 9) is None
    assert found(parser, 10) == "a"
    parser.apply("a", encode(EventFrame(0, CONTROL_ATTEMPT, 20, [WaitDecided("0.0", "approval", "allow", "d")])))
    assert found(parser, 19) == "b", "the other one does not only wait any more"
    parser.apply("b", encode(EventFrame(0, CONTROL_ATTEMPT, 20, [PutAway()])))
    assert found(parser, 19) == "c"


def test_a_look_costs_nothing_for_runs_that_wait_for_less_long(
    parser: ParserLogic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        waits(parser, f"run{number}", 10)
    looked_at: list[str] = []
    rests = logic.rests

    def counted(s: RunState) -> bool:
        looked_at.append(s.run)
        return rests(s)

    monkeypatch.setattr(logic, "rests", counted)
    assert found(parser, 9) is None
    assert looked_at == ["run0"]

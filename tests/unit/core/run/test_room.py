"""What a run and a turn may say in all."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.core.run.script import RUN, START_MS, accepted
from tokenbus.core.run.gated_run import GatedRun, accept
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.events import normalized as n
from tokenbus.events.frames import CONTROL_ATTEMPT, BusEvent, EventFrame, PolicyPlan, RunLimits, ToolReturned
from tokenbus.events.public import RunFailedEvent

RULES = RunLimits(turn_bytes=100, run_bytes=250)
MACHINES = pytest.mark.parametrize(
    "policy_plan", [None, PolicyPlan(("p",), "pass", 1000)], ids=["alone", "with policies"]
)


def begin(policy_plan: PolicyPlan | None, **fields: object) -> RunMachine | GatedRun:
    return accept(RUN, msgspec.structs.replace(accepted(rules=RULES, **fields), policy_plan=policy_plan), START_MS)


def apply(run: RunMachine | GatedRun, size: int, *events: BusEvent, control: bool = False) -> None:
    attempt = CONTROL_ATTEMPT if control else run.state.attempt
    run.handle(EventFrame(run.state.turn, attempt, START_MS, list(events)), size)


def error_of(run: RunMachine | GatedRun) -> str | None:
    [*_, last] = run.out.number(RUN, 0) or [None]
    return last.error.code if isinstance(last, RunFailedEvent) else None


@MACHINES
def test_a_turn_over_the_output_limit_fails_its_run_before_the_rest_is_applied(policy_plan: PolicyPlan | None) -> None:
    run = begin(policy_plan)
    apply(run, 100, n.BlockStart(0, "text"), n.TextDelta(0, "short"))
    assert not run.over
    apply(run, 1, n.TextDelta(0, "more"))
    assert run.over
    assert "".join(run.state.blocks.open[0].pieces if run.state.blocks.open else []) in ("", "short")
    assert error_of(run) == "turn_too_large"


@MACHINES
def test_all_attempts_of_a_turn_count_together(policy_plan: PolicyPlan | None) -> None:
    run = begin(policy_plan)
    for _ in range(2):
        apply(run, 60, n.Cut("cut"))
    assert run.over
    assert error_of(run) == "turn_too_large"


def test_each_turn_has_its_own_bound_and_the_run_has_one_for_all() -> None:
    run = begin(None, tools=["t"], max_tool_depth=9)
    for turn in range(2):
        apply(run, 90, n.ToolCallStart(0, f"id{turn}", "t"), n.ToolCallDone(0), n.Done("tool_use"))
        call = run.state.calls[0].call.block
        apply(run, 30, ToolReturned(call, "done", is_error=False), control=True)
        assert run.state.turn == turn + 1
    assert not run.over
    apply(run, 20, n.BlockStart(0, "text"))
    assert run.over
    assert error_of(run) == "run_too_large"

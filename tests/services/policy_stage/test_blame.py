"""Who pays for an executor that ended, and how often a policy may begin again."""

from __future__ import annotations

import pytest

from tokenbus.policy.policy_runner import OnError
from tokenbus_services.executor.marks import ExecutorMarks, MarkedCall
from tokenbus_services.policy_stage.executors import culprit, is_evidence
from tokenbus_services.policy_stage.failed_starts import (
    WORKERS_IN_SHARED,
    WORKERS_PER_START,
    RunStarts,
    StartDecision,
    Starts,
    decide_start,
    reason,
)
from tokenbus_services.policy_stage.messages import Failing

MOST, LIMIT = 3, 1000
ONE, OTHER = MarkedCall(1, 0, 7), MarkedCall(2, 1, 9)


def marks(
    call: MarkedCall | None, *, grew: MarkedCall | None = None, grew_bytes: int = 0, out_of_memory: bool = False
) -> ExecutorMarks:
    return ExecutorMarks(1, call, grew, grew_bytes, out_of_memory, waiting_calls=0, beats=0)


def test_the_running_call_is_blamed_for_a_crash_or_a_stall():
    assert culprit(marks(ONE), "exited", memory_bytes=LIMIT, alone=False) == ONE
    assert culprit(marks(ONE), "blocked", memory_bytes=LIMIT, alone=False) == ONE


def test_no_run_is_at_fault_if_no_call_was_active_among_several_runs():
    assert culprit(marks(None), "exited", memory_bytes=LIMIT, alone=False) is None


def test_an_end_outside_every_call_is_blamed_on_no_policy():
    assert culprit(marks(None), "exited", memory_bytes=LIMIT, alone=True) is None


def test_in_a_lone_run_the_policy_with_the_most_memory_is_blamed():
    seen = marks(OTHER, grew=ONE, grew_bytes=LIMIT // 10)
    assert culprit(seen, "memory", memory_bytes=LIMIT, alone=True) == ONE


def test_the_end_of_a_shared_executor_is_evidence_only_of_a_call_that_did_not_return():
    assert [is_evidence(end, alone=False) for end in ("blocked", "overran", "stalled", "exited", "memory")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert is_evidence("exited", alone=True)
    assert is_evidence("memory", alone=True)


def test_the_call_with_the_most_memory_is_at_fault_and_not_the_refused_one():
    seen = marks(ONE, grew=OTHER, grew_bytes=LIMIT * 3 // 4, out_of_memory=True)
    assert culprit(seen, "exited", memory_bytes=LIMIT, alone=False) == OTHER


def test_memory_asked_for_at_once_is_the_fault_of_the_call_that_was_refused():
    seen = marks(ONE, grew=OTHER, grew_bytes=LIMIT // 10, out_of_memory=True)
    assert culprit(seen, "exited", memory_bytes=LIMIT, alone=False) == ONE


def test_memory_that_grew_by_many_calls_is_nobodys_fault():
    seen = marks(ONE, grew=OTHER, grew_bytes=LIMIT // 10)
    assert culprit(seen, "memory", memory_bytes=LIMIT, alone=False) is None


def decide(starts: RunStarts, **on_error: OnError) -> StartDecision:
    return decide_start(starts, tuple(on_error), on_error, most=MOST)


def of(**counts: Starts) -> RunStarts:
    return RunStarts(counts)


def test_a_policy_without_a_failure_is_not_suspected():
    assert decide(of(a=Starts()), a="block", b="block") == StartDecision()


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_whose_policy_failed_is_isolated_until_its_starts_are_used_up(count: int):
    assert decide(of(b=Starts(count, 4)), a="block", b="block") == StartDecision(isolated=True)


def test_after_its_last_start_block_ends_the_run():
    decided = decide(of(b=Starts(MOST, 4)), a="pass", b="block")
    assert decided == StartDecision(ended_by="b", why=reason(MOST))


def test_after_its_last_start_pass_calls_the_policy_as_far_as_it_came_and_then_not_at_all():
    decided = decide(of(a=Starts(MOST, 4)), a="pass", b="block")
    assert decided == StartDecision(failing={"a": Failing(4, reason(MOST))}, isolated=True)
    decided = decide(of(a=Starts(MOST + 1, 4)), a="pass", b="block")
    assert decided == StartDecision(failing={"a": Failing(0, reason(MOST))})


def test_a_run_shares_an_executor_after_one_lost_worker_and_is_isolated_after_several():
    assert not decide(RunStarts(lost_in_shared=1), a="block").isolated
    assert decide(RunStarts(lost_in_shared=WORKERS_IN_SHARED), a="block") == StartDecision(isolated=True)


def test_no_number_of_workers_that_were_lost_beside_others_ends_a_run():
    assert decide(RunStarts(lost_in_shared=1000), a="block") == StartDecision(isolated=True)


def test_a_failed_start_and_two_killed_workers_do_not_end_a_run():
    assert decide(RunStarts({"a": Starts(1, 4)}, lost_in_own=2), a="block") == StartDecision(isolated=True)


def test_a_policy_that_takes_its_worker_with_it_each_time_ends_its_run():
    most = MOST * WORKERS_PER_START
    assert decide(RunStarts(lost_in_own=most - 1), a="block") == StartDecision(isolated=True)
    assert decide(RunStarts(lost_in_own=most), a="block").ended_by == "a"


@pytest.mark.parametrize("more", [RunStarts(unexplained=MOST), RunStarts(lost_in_own=MOST * WORKERS_PER_START)])
def test_if_the_policy_at_fault_is_unknown_those_with_pass_are_left_out_first(more: RunStarts):
    decided = decide(more, a="block", b="pass", c="pass")
    assert (decided.ended_by, set(decided.failing), decided.isolated) == (None, {"b", "c"}, True)
    more.unexplained += 1
    assert decide(more, a="block", b="pass", c="pass").ended_by == "a"
    assert set(decide(more, b="pass", c="pass").failing) == {"b", "c"}

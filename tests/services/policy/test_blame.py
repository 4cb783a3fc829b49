"""Who pays for an executor that ended, and how often a policy may begin again."""

from __future__ import annotations

import pytest

from tokenbus.policy.policy_runner import OnError
from tokenbus_services.policy_stage.blame import StartDecision, Starts, culprit, decide_start, reason
from tokenbus_services.policy_stage.marks import Call, Marks
from tokenbus_services.policy_stage.messages import Failing

MOST, LIMIT = 3, 1000
ONE, OTHER = Call(1, 0, 7), Call(2, 1, 9)


def marks(call: Call | None, *, grew: Call | None = None, grew_bytes: int = 0, out_of_memory: bool = False) -> Marks:
    return Marks(1, call, grew, grew_bytes, out_of_memory, waiting_calls=0, beats=0)


def test_the_call_at_work_is_at_fault_for_a_death_or_a_standstill():
    assert culprit(marks(ONE), "exited", memory_bytes=LIMIT, alone=None) == ONE
    assert culprit(marks(ONE), "blocked", memory_bytes=LIMIT, alone=None) == ONE


def test_nobody_is_at_fault_if_no_call_was_at_work_and_several_runs_were_there():
    assert culprit(marks(None), "exited", memory_bytes=LIMIT, alone=None) is None


def test_a_run_that_was_alone_is_at_fault_whatever_the_marks_say():
    assert culprit(marks(None), "exited", memory_bytes=LIMIT, alone=5) == Call(5, 0, 0)


def test_memory_is_the_fault_of_the_call_that_took_most_of_it_and_not_of_the_one_that_was_refused():
    seen = marks(ONE, grew=OTHER, grew_bytes=LIMIT * 3 // 4, out_of_memory=True)
    assert culprit(seen, "exited", memory_bytes=LIMIT, alone=None) == OTHER


def test_memory_asked_for_at_once_is_the_fault_of_the_call_that_was_refused():
    seen = marks(ONE, grew=OTHER, grew_bytes=LIMIT // 10, out_of_memory=True)
    assert culprit(seen, "exited", memory_bytes=LIMIT, alone=None) == ONE


def test_memory_that_grew_by_many_calls_is_nobodys_fault():
    seen = marks(ONE, grew=OTHER, grew_bytes=LIMIT // 10)
    assert culprit(seen, "memory", memory_bytes=LIMIT, alone=None) is None


def test_a_policy_with_nothing_against_it_is_no_suspect():
    assert decide_start({"a": Starts()}, ("a", "b"), {"a": "block", "b": "block"}, most=MOST) == StartDecision()


@pytest.mark.parametrize("count", [1, 2])
def test_a_policy_that_failed_is_a_suspect_until_its_starts_are_used_up(count: int):
    decided = decide_start({"b": Starts(count, 4)}, ("a", "b"), {"a": "block", "b": "block"}, most=MOST)
    assert decided == StartDecision(suspects=["b"])


def test_after_its_last_start_block_ends_the_run():
    decided = decide_start({"b": Starts(MOST, 4)}, ("a", "b"), {"a": "pass", "b": "block"}, most=MOST)
    assert decided.ended_by == "b"


def test_after_its_last_start_pass_calls_the_policy_as_far_as_it_came_and_then_not_at_all():
    on_error: dict[str, OnError] = {"a": "pass", "b": "block"}
    decided = decide_start({"a": Starts(MOST, 4)}, ("a", "b"), on_error, most=MOST)
    assert decided == StartDecision(failing={"a": Failing(4, reason(MOST))}, suspects=["a"])
    decided = decide_start({"a": Starts(MOST + 1, 4)}, ("a", "b"), on_error, most=MOST)
    assert decided == StartDecision(failing={"a": Failing(0, reason(MOST))})

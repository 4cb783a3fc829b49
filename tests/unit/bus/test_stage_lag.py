"""The lag of a stage from the counters of its lease."""

from __future__ import annotations

from tokenbus.bus.stage_lag import lag_of


def test_the_lag_is_what_arrived_and_is_not_done() -> None:
    assert lag_of(b"12", b"5") == 7


def test_a_group_that_never_counted_has_no_lag() -> None:
    assert lag_of(None, None) == 0


def test_arrivals_lost_in_a_fail_over_do_not_make_the_lag_negative() -> None:
    assert lag_of(b"5", b"12") == 0

"""When a dead child is started again."""

from __future__ import annotations

from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.up.supervisor import (
    FIRST_PAUSE_S,
    HEALTHY_S,
    LONGEST_PAUSE_S,
    RestartBackoff,
    how_it_ended,
    will_not_recover,
)


def test_pauses_double_up_to_their_bound():
    restarts = RestartBackoff()
    pauses = [restarts.pause_s(ready_for_s=None) for _ in range(12)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == max(pauses) == LONGEST_PAUSE_S


def test_a_healthy_minute_forgets_earlier_deaths():
    restarts = RestartBackoff()
    for _ in range(5):
        restarts.pause_s(ready_for_s=None)
    assert restarts.pause_s(ready_for_s=HEALTHY_S) == FIRST_PAUSE_S
    assert restarts.pause_s(ready_for_s=HEALTHY_S - 1) == 2 * FIRST_PAUSE_S, "a shorter time does not"


def test_only_a_child_that_never_worked_and_blames_its_settings_is_given_up():
    assert will_not_recover(ending.USAGE, was_ready=False)
    assert not will_not_recover(ending.USAGE, was_ready=True)
    assert not will_not_recover(ending.SERVER, was_ready=False)


def test_an_end_by_signal_is_reported_by_its_name():
    assert how_it_ended(137) == "was ended by SIGKILL"
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(255) == "ended with exit code 255"

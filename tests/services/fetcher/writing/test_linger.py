"""How long a flush gathers follows how busy the process is."""

from __future__ import annotations

import pytest

from tokenbus_services.fetcher.writing.raw_writer import Linger, busy_s


@pytest.mark.parametrize(("busy", "waits"), [(0.0, 0.0), (0.4, 0.0), (0.5, 0.0), (0.75, 1.5), (1.0, 3.0)])
def test_nothing_waits_below_half_busy_and_all_of_the_setting_when_saturated(busy: float, waits: float) -> None:
    now = 100.0
    linger = Linger(3.0, busy_s=lambda: busy * now)
    assert linger.seconds(now) == 0.0, "nothing is known yet"
    for now in (101.0, 102.0):
        assert linger.seconds(now) == pytest.approx(waits)


def test_a_linger_time_is_reused_for_a_while() -> None:
    looks = iter([0.0, 1.0])
    linger = Linger(3.0, busy_s=lambda: next(looks))
    assert linger.seconds(10.0) == linger.seconds(10.05) == 0.0
    assert linger.seconds(11.0) == linger.seconds(11.05) == pytest.approx(3.0)


def test_work_of_this_thread_counts() -> None:
    before = busy_s()
    sum(range(10**6))
    assert busy_s() > before

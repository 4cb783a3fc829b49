"""A short soak, and what the judge calls flat."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.soak.judging import Series, Tolerance, judge, slope
from tests.soak.soak import Plan, soak

TOLERANCE = Tolerance()
MIB = 2**20


def series(values: list[float], unit: str = "bytes") -> Series:
    return Series("x", unit, [float(n) for n in range(len(values))], values)  # type: ignore[arg-type]


def grows(values: list[float], unit: str = "bytes") -> bool:
    [finding] = judge([series(values, unit)], TOLERANCE)
    return not finding.flat


CHANCE = random.Random(11)
NOISE = [100 * MIB + CHANCE.gauss(0, 3 * MIB) for _ in range(400)]


def test_noise_a_sawtooth_single_peaks_and_a_warm_up_are_flat() -> None:
    assert not grows(NOISE)
    assert not grows([100 * MIB + (n % 40) * MIB for n in range(400)])
    assert not grows([v + (200 * MIB if n % 50 == 0 else 0) for n, v in enumerate(NOISE)])
    assert not grows([v - 60 * MIB * math.exp(-n / 20) for n, v in enumerate(NOISE)])
    assert not grows([20 + n % 5 for n in range(400)], "count")
    assert not grows(NOISE[::-1] + [v - 30 * MIB for v in NOISE])


def test_a_leak_under_noise_is_found() -> None:
    assert grows([v + n * 0.03 * MIB for n, v in enumerate(NOISE)])
    assert grows([100 * MIB + (n % 40) * MIB + n * 0.03 * MIB for n in range(400)])
    assert grows([20 + n // 20 for n in range(400)], "count")


def test_a_pool_that_grows_to_its_busiest_moment_is_flat_and_a_leak_of_sockets_is_none():
    assert not grows([20 + 12 * (n > 200) for n in range(400)], "sockets")
    assert grows([20 + n // 8 for n in range(400)], "sockets")


def test_a_level_may_move_in_waves_and_must_not_leave_them() -> None:
    waves = [(5 + 4 * math.sin(n / 60)) * MIB for n in range(400)]
    assert not grows(waves, "level")
    assert grows([value + n * 0.12 * MIB for n, value in enumerate(waves)], "level")


def test_the_slope_is_that_of_the_line_despite_a_few_outliers() -> None:
    points = [(float(n), 3.0 * n) for n in range(50)]
    points[7] = (7.0, 1e9)
    assert slope(points) == pytest.approx(3.0)


@pytest.mark.timeout(280)
async def test_connections_files_and_keys_stay_flat_under_a_mixed_load(tmp_path: Path) -> None:
    # A quarter of a minute is all warm-up to the memory of Python processes, so only gross growth counts here.
    tolerance = Tolerance(share=0.3, least_bytes=24 * MIB, least_count=40, least_sockets=40)
    # A run's end must be seen before the run is forgotten, also by a process that gets little time on a loaded machine.
    plan = Plan(seconds=16, share=0.3, calibrate_s=6, keep_s=20, tolerance=tolerance)
    result = await soak(plan, tmp_path)
    assert [f for f in result.findings if not f.flat] == []
    assert (result.unended, result.left, result.complaints) == ([], [], [])
    assert result.outcomes["completed"] > 5
    assert result.passed

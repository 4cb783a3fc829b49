"""Decides whether a series of measurements grows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

Unit = Literal["bytes", "count", "sockets", "level"]
"""``level``: bytes that rise and fall in waves of many minutes."""
WARM = 0.3
"""The first share of the time, which is not judged: caches fill, and what has a TTL has not expired yet."""
_APART = 0.4
"""Share of the time: pairs of points that are nearer do not count."""
_MOST_POINTS = 200
"""Points of a fit: the number of pairs is the square of this."""


class Series(msgspec.Struct):
    """One measured quantity over time."""

    name: str
    unit: Unit
    at_s: list[float] = []
    values: list[float] = []


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum growth of a flat series over the judged time: the larger of the two."""

    share: float = 0.05
    """Share of its median."""
    least_bytes: float = 4 * 2**20
    least_count: float = 8
    least_sockets: float = 24
    """Pools of connections grow to the number that their busiest moment needs, and stay there: with 40 concurrent runs
    a fetcher has 12 connections more to the server than at its start, and the next 40 runs add none. A leak per run is
    far beyond this.
    """


class Finding(msgspec.Struct, frozen=True):
    """The result for one series."""

    name: str
    unit: Unit
    middle: float
    """The median of the judged time."""
    highest: float
    grew: float
    """The fitted growth over that time; below 0 it shrank. Of a level: the second half's median beyond the first half's
    highest.
    """
    allowed: float

    @property
    def flat(self) -> bool:
        return self.grew <= self.allowed


def judge(series: Sequence[Series], tolerance: Tolerance) -> list[Finding]:
    """A finding for each series. Raises ValueError for a series of fewer than four points, which is too short for a
    soak.
    """
    return [_finding(one, tolerance) for one in series]


def _finding(series: Series, tolerance: Tolerance) -> Finding:
    begin, end = series.at_s[0], series.at_s[-1]
    judged = [
        (at, value) for at, value in zip(series.at_s, series.values, strict=True) if at >= begin + WARM * (end - begin)
    ]
    if len(judged) < 4:
        raise ValueError(f"{series.name}: {len(judged)} measurements are too few")
    middle = median(value for _, value in judged)
    if series.unit == "level":
        half = len(series.values) // 2
        grew = median(series.values[half:]) - max(series.values[:half])
    else:
        grew = slope(judged) * (judged[-1][0] - judged[0][0])
    least = {
        "bytes": tolerance.least_bytes,
        "count": tolerance.least_count,
        "sockets": tolerance.least_sockets,
        "level": tolerance.least_bytes,
    }[series.unit]
    allowed = max(tolerance.share * middle, least)
    return Finding(series.name, series.unit, middle, max(value for _, value in judged), grew, allowed)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between pairs of points (Theil and Sen): single peaks do not change it.

    Only pairs far apart count. Most near ones lie on one tooth of a saw, which only rises.
    """
    thinned = points[:: max(1, len(points) // _MOST_POINTS)]
    apart = _APART * (points[-1][0] - points[0][0])
    slopes = [
        (y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(thinned) for x2, y2 in thinned[i + 1 :] if x2 - x1 > apart
    ]
    return median(slopes) if slopes else 0.0

"""The chaos in short: no violation; and a build that is broken on purpose is caught, another one with each seed.

All four take as long as a fifth of all end-to-end tests. `make chaos BROKEN=` plays a given one. That the judge reports
each violation is tested in `test_judge`, and that the scripts need their checks in `tests/model`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos.faults import Rates
from tests.chaos.judging import judge
from tests.chaos.round import SETTLE_S, Plan, play

KILLS = Rates(pause_s=0.4, weights={"kill": 1})
FREEZES = Rates(pause_s=0.5, freeze_s=(2.5, 3.5), weights={"freeze": 1})
CAUGHT: dict[str, tuple[Rates, float, set[str]]] = {
    "fence": (FREEZES, 6, {"log", "content", "topics"}),
    "early-ack": (KILLS, SETTLE_S, {"every run ends"}),
    "watermark": (KILLS, SETTLE_S, {"every run ends", "log", "content"}),
    "rulings": (KILLS, SETTLE_S, {"content", "log"}),
}
"""By build: what brings it out, how long to wait for runs, and the rules of which one at least is broken. A run without
an end counts only where the wait was long enough for any."""
ROUNDS = 4
"""A round meets the planted defect only by chance: it counts as missed after this many rounds."""


@pytest.fixture
def seed() -> str:
    seed = os.environ.get("TOKENBUS_SEED") or str(random.randrange(10**6))
    print(f"seed {seed} (TOKENBUS_SEED)")
    return seed


@pytest.mark.timeout(180)
async def test_nothing_is_lost_doubled_or_out_of_order_whatever_breaks(tmp_path: Path, seed: str):
    record = await play(Plan(seed=seed, seconds=10), tmp_path)
    assert judge(record) == []
    assert record.faults


@pytest.mark.timeout(400)
async def test_a_build_that_is_broken_on_purpose_is_caught(tmp_path: Path, seed: str):
    build = random.Random(seed).choice([*CAUGHT])
    print(f"build {build}")
    rates, settle_s, rules = CAUGHT[build]
    share = 1.0 if build == "rulings" else 0.0
    found: set[str] = set()
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        directory.mkdir()
        plan = Plan(seed=f"{seed}.{number}", seconds=6, rates=rates, build=build, settle_s=settle_s, guarded=share)
        found |= {violation.rule for violation in judge(await play(plan, directory))}
        if rules & found:
            return
    pytest.fail(f"{ROUNDS} rounds broke {found or 'nothing'}, and none of {rules}")

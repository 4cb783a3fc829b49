"""A short chaos: no violation; and the judge catches a build that is broken on purpose, another one with each seed.

All builds take a fifth of the time of all end-to-end tests. `make chaos BROKEN=` plays a given one. `test_judge`
tests that the judge reports each violation, and `tests/model` that the scripts need their checks.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos.broken import unfenced
from tests.chaos.deployment.servers import ROOM_S
from tests.chaos.faults import THEMES, Rates
from tests.chaos.judging import judge
from tests.chaos.round import SETTLE_S, Plan, play
from tests.unit.bus.test_script_contracts import Lint
from tokenbus.bus.scripts.script import declared

KILLS = Rates(pause_s=0.4, weights={"kill": 1})
FREEZES = Rates(pause_s=0.5, freeze_s=(2.5, 3.5), weights={"freeze": 1})
STANDS = Rates(pause_s=0.5, freeze_kind_s=(9.0, 12.0), weights={"stop a kind": 1})
FULL = Rates(pause_s=0.5, weights={"full server": 1})
CAUGHT: dict[str, tuple[Rates, float, float, set[str]]] = {
    "fence": (FREEZES, 6, 6, {"log", "content", "topics"}),
    "early-ack": (KILLS, 6, SETTLE_S, {"every run ends"}),
    "watermark": (KILLS, 6, SETTLE_S, {"every run ends", "log", "content"}),
    "rulings": (KILLS, 6, SETTLE_S, {"content", "log"}),
    "impatient": (STANDS, 12, SETTLE_S, {"workers"}),
    "no-room": (FULL, ROOM_S + 5, SETTLE_S, {"room"}),
    "tree": (KILLS, 6, SETTLE_S, {"trees"}),
    "appends-twice": (KILLS, 6, SETTLE_S, {"talks"}),
    "steers-twice": (KILLS, 6, SETTLE_S, {"talks"}),
    "places": (KILLS, 6, SETTLE_S, {"talks"}),
}
"""By build: the plan that exposes it, its seconds, how long to wait for runs, and the rules of which at least one is
broken. A run without an end counts only if the wait was long enough for any run.
"""
ROUNDS = 4
"""A round meets the planted defect only by chance: after this many rounds it counts as missed."""


@pytest.fixture
def seed() -> str:
    seed = os.environ.get("TOKENBUS_SEED") or str(random.randrange(10**6))
    print(f"seed {seed} (TOKENBUS_SEED)")
    return seed


def test_the_script_of_the_build_without_a_fence_is_sound_but_for_its_fence():
    text = declared["commit"].script.text
    assert "'fenced'" in text
    assert "'fenced'" not in unfenced(text)
    assert Lint(unfenced(text)).problems == []


@pytest.mark.timeout(180)
async def test_nothing_is_lost_doubled_or_out_of_order_under_faults(tmp_path: Path, seed: str):
    record = await play(Plan(seed=seed, seconds=10), tmp_path)
    assert judge(record) == []
    assert record.faults


@pytest.mark.timeout(240)
async def test_what_takes_or_stands_ends_no_worker_and_delays_no_other_run(tmp_path: Path, seed: str):
    """Each seed plays one of the themes."""
    weights = random.Random(seed).choice(THEMES)
    record = await play(Plan(seed=seed, seconds=12, rates=Rates(weights=weights), hostile=0.3), tmp_path)
    assert judge(record) == []
    assert record.faults


@pytest.mark.timeout(400)
async def test_the_judge_catches_a_build_that_is_broken_on_purpose(tmp_path: Path, seed: str):
    build = random.Random(seed).choice([*CAUGHT])
    print(f"build {build}")
    rates, seconds, settle_s, rules = CAUGHT[build]
    share = 1.0 if build == "rulings" else 0.0
    found: set[str] = set()
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        directory.mkdir()
        plan = Plan(
            seed=f"{seed}.{number}", seconds=seconds, rates=rates, build=build, settle_s=settle_s, guarded=share
        )
        found |= {violation.rule for violation in judge(await play(plan, directory))}
        if rules & found:
            return
    pytest.fail(f"{ROUNDS} rounds broke {found or 'nothing'}, and none of {rules}")

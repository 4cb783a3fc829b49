"""Seeds of the simulation: no run loses, doubles or reorders anything, and one seed is one trace."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from shutil import which

import pytest

from tests.simulated_faults import guards
from tests.simulated_faults.play import Kept, kept

SEEDS = 4

pytestmark = pytest.mark.skipif(not which("cc"), reason="the server's clock needs a C compiler")


async def _simulated(*words: str) -> str:
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.simulated_faults",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await made.communicate()
    finally:
        if made.returncode is None:
            made.kill()
    assert made.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.timeout(400)
async def test_nothing_is_lost_doubled_or_out_of_order_in_simulated_time() -> None:
    seed = os.environ.get("TOKENBUS_SEED") or str(random.randrange(10**6))
    await _simulated("--seed", seed, "--seeds", str(SEEDS), "--no-shrink")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("one", kept(), ids=[one.why for one in kept()])
async def test_a_seed_that_went_wrong_once_goes_well(one: Kept) -> None:
    plan = one.plan
    numbers = ",".join(map(str, plan.numbers or ()))
    words = ("--fleet", plan.fleet, "--faults", ",".join(plan.faults), "--numbers", numbers)
    await _simulated("--seed", str(plan.seed), *words, "--no-shrink")


@pytest.mark.timeout(200)
async def test_the_same_seed_is_the_same_trace() -> None:
    words = ("--seed", "7", "--fleet", "chained")
    traces = [next(line for line in (await _simulated(*words)).splitlines() if "trace" in line) for _ in range(2)]
    assert traces[0] == traces[1]


def test_the_page_has_the_guards_that_were_tried() -> None:
    assert guards.table() in guards.PAGE.read_text(encoding="utf-8"), "write it with: make simulate-faults GUARDS="
    assert all(trial.seeds for trial in guards.trials())

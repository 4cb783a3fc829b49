"""Which faults a round injects."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from tests.chaos.faults import Chaos, Rates


async def test_a_round_may_have_only_faults_that_last_throughout() -> None:
    """`make chaos FAULTS=clocks`."""
    nothing: Any = SimpleNamespace(kinds=())
    chaos = Chaos(random.Random(1), Rates(pause_s=0.001, weights={}), nothing, nothing, nothing, nothing)
    await chaos.run(0.01)
    assert not chaos.tally

"""Random orders of events keep every guarantee; if a script is broken, they detect it."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.actors import Wire
from tests.model.machine import Protocol
from tests.servers import binary
from tokenbus.bus.scripts import chain, commit
from tokenbus.bus.scripts.runs import accept as runs
from tokenbus.bus.scripts.runs import attempt_fence
from tokenbus.bus.scripts.runs import inputs as run_inputs
from tokenbus.bus.scripts.script import script
from tokenbus.bus.stage import checkpoints
from tokenbus_services.process.embedded_server import EmbeddedServer

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "30"))
STEPS = 100
BATCH = 25
"""Histories of one seed. Hypothesis begins a large number of them with many that are too small to find anything."""
BATCHES = 200
"""In which a broken script is searched for. The hardest one is found in one history of about 250."""
FIRST_SEED = {"two writers share an attempt": 3}
"""Where the search begins, else at 1, so that the first batch finds it. If the model changes, it may take longer."""


@pytest.fixture(scope="module")
def wire() -> Generator[Wire]:
    """A server of the model's own, that trims exactly: what is needed and trimmed is then missed."""
    with EmbeddedServer(binary=binary(), options={"stream-node-max-entries": "1"}) as server:
        yield Wire(server.url)


def explore(
    wire: Wire, examples: int, *, phases: tuple[Phase, ...] = tuple(Phase), beginning: int | None = None
) -> None:
    """Try this many random histories of STEPS steps each; `beginning` is the seed of the first."""
    model = type("Model", (Protocol,), {"wire": wire})
    run_state_machine_as_test(
        model if beginning is None else seed(beginning)(model),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            database=None,
            report_multiple_bugs=False,
            phases=phases,
        ),
    )


def search(wire: Wire, first: int) -> None:
    """Try BATCHES batches of histories, the first of this seed; the first violation is raised."""
    for at in range(first, first + BATCHES):
        explore(wire, BATCH, phases=(Phase.generate,), beginning=at)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints after a few entries, so that the watermark moves past open runs."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 300)
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINT_SPAN", 600)


@pytest.mark.timeout(0)
def test_random_histories_keep_the_guarantees(wire: Wire):
    explore(wire, EXAMPLES)


BROKEN: dict[str, tuple[Any, str, str, str]] = {
    "the fence is gone": (commit, "_COMMIT", "if h[1] ~= ARGV[1] then", "if false then"),
    "a commit writes twice": (commit, "_COMMIT", "if h[2] ~= ARGV[3] then", "if false then"),
    "the watermark goes too far": (commit, "_COMMIT", "ARGV[4], ARGV[5], now", "ARGV[4], ARGV[4], now"),
    "the offset moves before the outputs": (
        commit,
        "_COMMIT",
        "operate(13,",
        "if h[2] ~= '0-0' then redis.call('HSET', KEYS[1], 'offset', ARGV[4]) return {'ok'} end operate(13,",
    ),
    "chained, the first fence is gone": (chain, "_CHAIN", "if one[1] ~= ARGV[1] or", "if"),
    "chained, what came in between is passed over": (
        chain,
        "_CHAIN",
        "if #of_one > 0 or #of_two > 0 then",
        "if false then",
    ),
    "chained, a closed run goes on": (
        chain,
        "_CHAIN",
        "if h[1] ~= 'open' or h[2] ~= attempt or h[4] == attempt or",
        "if",
    ),
    "chained, the watermark goes too far": (chain, "_CHAIN", "ARGV[8] ~= '' and ARGV[8] or raw", "raw"),
    "chained, the second offset stays": (chain, "_CHAIN", "if events ~= ARGV[5] then", "if false then"),
    "a frame may come twice": (attempt_fence, "_APPEND", "h[3] ~= frame then", "false then"),
    "two writers share an attempt": (attempt_fence, "_APPEND", "h[5]", "writer"),
    "a closed attempt goes on": (attempt_fence, "_APPEND", "h[4] == attempt then", "false then"),
    "a tool result enters twice": (run_inputs, "_TOOL_RESULT", "redis.call('HDEL', KEYS[1], ARGV[2])", ""),
    "a run is accepted twice": (runs, "_ACCEPT", "'awaited' then return h[1] end", "'awaited' then h = {} end"),
    "a cancel enters twice": (
        runs,
        "_CANCEL",
        "if status ~= 'open' then",
        "if status ~= 'open' and status ~= 'cancelling' then",
    ),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_script_is_found(wire: Wire, monkeypatch: pytest.MonkeyPatch, what: str):
    module, name, text, instead = BROKEN[what]
    whole = getattr(module, name)
    assert text in whole.text, "the script is another by now"
    monkeypatch.setattr(module, name, script(whole.name, whole.text.replace(text, instead)))
    with pytest.raises(AssertionError):
        search(wire, FIRST_SEED.get(what, 1))

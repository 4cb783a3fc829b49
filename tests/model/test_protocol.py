"""Random orders of events keep every guarantee; if a script is broken, they detect it."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.actors import Wire
from tests.model.conversation import Writer
from tests.model.machine import KEYS, Conversing, Protocol
from tests.servers import binary
from tokenbus.bus.scripts.script import LuaScript, declared
from tokenbus_services.process.embedded_server import EmbeddedServer

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "30"))
STEPS = 100
BATCH = 25
"""Histories of one seed. Hypothesis begins a large number of them with many that are too small to find anything."""
BATCHES = 200
"""In which a broken script is searched for. The hardest one is found in one history of about 250."""
FIRST_SEED = {
    "two writers share an attempt": 3,
    "chained, a closed run goes on": 4,
    "a tool result enters twice": 5,
    "an append goes into what has changed": 2,
}
"""Where the search begins, else at 1: the first batch finds it. If the model changes, it may take longer."""


@pytest.fixture(scope="module")
def told() -> Generator[dict[str, object]]:
    """A server of the model's own, that trims exactly: what is needed and trimmed is then missed."""
    with EmbeddedServer(binary=binary(), options={"stream-node-max-entries": "1"}) as server:
        writer = Writer(server.url, KEYS)
        yield {"wire": Wire(server.url), "writer": writer}
        writer.close()


def knowing(model: type[Protocol], told: dict[str, object]) -> type[Protocol]:
    """The model with its server."""
    return cast("type[Protocol]", type("Model", (model,), told))


def explore(
    model: type[Protocol], examples: int, *, phases: tuple[Phase, ...] = tuple(Phase), beginning: int | None = None
) -> None:
    """Try this many random histories of STEPS steps each; `beginning` is the seed of the first."""
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


def search(model: type[Protocol], first: int) -> None:
    """Try BATCHES batches of histories, the first of this seed; the first violation is raised."""
    for at in range(first, first + BATCHES):
        explore(model, BATCH, phases=(Phase.generate,), beginning=at)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", [Protocol, Conversing])
def test_random_histories_keep_the_guarantees(told: dict[str, object], model: type[Protocol]):
    explore(knowing(model, told), EXAMPLES)


APPEND = "attempt_fence.append_raw"
READ = "= h[1], h[2], h[3], h[4], h[5]"
"""What the fence of an attempt reads of the run."""
BROKEN = {
    "the fence is gone": ("commit", "if h[1] ~= token then", "if false then"),
    "a commit writes twice": ("commit", "if h[2] ~= begin then", "if false then"),
    "the watermark goes too far": ("commit", "h[6], watermark, now", "h[6], till, now"),
    "the offset moves before the outputs": (
        "commit",
        "operate(operations_at,",
        "if h[2] ~= '0-0' then redis.call('HSET', lease, 'offset', till) return {'ok'} end operate(operations_at,",
    ),
    "chained, the first fence is gone": ("chain", "if one[1] ~= token_one or", "if"),
    "chained, what came in between is passed over": ("chain", "if #of_one > 0 or #of_two > 0 then", "if false then"),
    "chained, a closed run goes on": ("chain", READ, "= 'open', attempt, h[3] or '', false, h[5]"),
    "chained, the watermark goes too far": ("chain", "watermark_one ~= '' and watermark_one or raw", "raw"),
    "chained, the second offset stays": ("chain", "if events ~= begin_two then", "if false then"),
    "a frame may come twice": (APPEND, "frames ~= n then", "false then"),
    "two writers share an attempt": (APPEND, READ, "= h[1], h[2], h[3], h[4], writer"),
    "a closed attempt goes on": (APPEND, "if closed == attempt then return 'closed' end", ""),
    "a tool result enters twice": ("inputs.tool_result", "redis.call('HDEL', run_key, call)", ""),
    "a run is accepted twice": ("accept", "'awaited' then return h[1] end", "'awaited' then h = {} end"),
    "a cancel enters twice": (
        "accept.cancel",
        "if status ~= 'open' then",
        "if status ~= 'open' and status ~= 'cancelling' then",
    ),
}
BROKEN_IN_SESSIONS = {
    "an append is accepted twice": (
        "sessions.append",
        "if redis.call('HEXISTS', appends, append) == 1 then",
        "if false then",
    ),
    "an append goes into what has changed": ("sessions.append", "or (h[3] or '') ~= open_run", ""),
    "what waits starts nothing": ("commit", "if #taken > 0 then start_session_run", "if false then start_session_run"),
    "a message that starts a run waits on": ("commit", "s.waiting = s.waiting - #packed\n", ""),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", [*BROKEN, *BROKEN_IN_SESSIONS])
def test_a_broken_script_is_found(told: dict[str, object], monkeypatch: pytest.MonkeyPatch, what: str):
    name, text, instead = (BROKEN | BROKEN_IN_SESSIONS)[what]
    model = knowing(Conversing if what in BROKEN_IN_SESSIONS else Protocol, told)
    whole = declared[name].script.text
    assert text in whole, "the script is another by now"
    monkeypatch.setattr(declared[name], "script", LuaScript(name, lambda: whole.replace(text, instead)))
    with pytest.raises(AssertionError):
        search(model, FIRST_SEED.get(what, 1))

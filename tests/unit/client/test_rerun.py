"""The request that continues a run after its last turn."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.client.rerun import EndedRun, derived_id, resumed_request
from tokenbus.client.response import Response
from tokenbus.errors import RunNotRepeatable
from tokenbus.events.public import BlockComplete
from tokenbus.events.requests import Generate, Message, TextPart

REQUEST = Generate(id="r", provider="anthropic", model="m", messages=[Message(role="user", content="Hi")])
HISTORY = [Message(role="assistant", content="calls"), Message(role="user", content="results")]


def block(number: int, content: str, turn: int, **fields: Any) -> BlockComplete:
    about: dict[str, Any] = {"run": "r", "seq": number, "attempt": 1, "kind": "text", **fields}
    return BlockComplete(turn=turn, block=number, content=content, **about)


def test_earlier_turns_precede_the_text_of_the_last():
    response = Response.of(
        [block(0, "Let me look.", 0), block(1, "hm", 1, kind="thinking"), block(2, "So it ", 1, cut=True)]
    )
    request = resumed_request(EndedRun("r", REQUEST, HISTORY, 1), response, again=1)
    assert request.messages == [
        *REQUEST.messages,
        *HISTORY,
        Message(role="assistant", content=[TextPart(text="So it")]),
    ]


def test_a_call_that_was_cut_off_is_left_for_the_model_to_make_again():
    response = Response.of([block(0, "Let me look.", 0), block(1, "", 0, kind="tool_call", cut=True)])
    assert resumed_request(EndedRun("r", REQUEST, [], 0), response, again=1).messages[-1].role == "assistant"


def test_in_mode_prefill_the_text_is_the_participants_own():
    prefill = msgspec.structs.replace(REQUEST, mode="prefill", participant="Claude")
    response = Response.of([block(0, "Half", 0)])
    assert resumed_request(EndedRun("r", prefill, [], 0), response, again=1).messages[-1].participant == "Claude"
    with pytest.raises(RunNotRepeatable, match="prefill"):
        resumed_request(EndedRun("r", prefill, HISTORY, 1), response, again=1)


def test_a_model_that_cannot_continue_is_named_with_its_provider():
    ended = EndedRun("r", msgspec.structs.replace(REQUEST, provider="far-away"), [], 0, continues=False)
    with pytest.raises(RunNotRepeatable, match="m at far-away cannot continue"):
        resumed_request(ended, Response.of([block(0, "Half", 0)]), again=1)


def test_ids_of_new_runs_differ_by_run_by_way_and_by_count_and_fit_in_an_id():
    ids = {derived_id(run, how, n) for run in ("r", "s", "x" * 128) for how in ("retry", "resume") for n in (1, 2)}
    assert len(ids) == 12
    assert max(map(len, ids)) <= 128

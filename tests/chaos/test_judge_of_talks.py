"""The judge of sessions: it reports nothing for a correct one, and each single defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.chaos.judging import talks
from tests.chaos.record import Entry, Record, Talk
from tests.chaos.test_judge import block, well

RUN, NEXT = "s.x.0", "s.x.1"


def talk() -> Talk:
    """Ann starts a run, Ben steers it; Ann adds something and waits for the next run; Ben takes something back."""
    at = {"run": RUN, "run_seq": 2}
    events: list[dict[str, Any]] = [
        {"type": "configured", "append": "made"},
        {"type": "appended", "append": "a0", "item": {"type": "message", "content": "hello"}},
        {"type": "delivered", "append": "a0", "turn": 0, "run": RUN, "run_seq": -1},
        {"type": "appended", "append": "b0", "item": {"type": "message", "content": "shorter"}, **at},
        {"type": "delivered", "append": "b0", "turn": 1, **at},
        {"type": "appended", "append": "a1", "item": {"type": "message", "content": "note", "run": False}, **at},
        {"type": "delivered", "append": "a1", "turn": 0, **at},
        {"type": "appended", "append": "b1", "item": {"type": "message", "content": "never"}, **at},
        {"type": "returned", "append": "b1", "reason": "busy", **at},
        {"type": "appended", "append": "a2", "item": {"type": "message", "content": "more"}, **at},
        {"type": "run_ended", "status": "completed", "run": RUN, "run_seq": 9},
        {"type": "delivered", "append": "a2", "turn": 0, "run": NEXT, "run_seq": -1},
        {"type": "run_ended", "status": "cancelled", "run": NEXT, "run_seq": 0},
    ]
    own = [{"session_seq": n, **event} for n, event in enumerate(events)]
    first = [f"{RUN}:{n}" for n in range(10)]
    got = ["0", "1", "2", *first[:3], *map(str, range(3, 10)), *first[3:], "10", "11", f"{NEXT}:0", "12"]
    said = ["hello", "Hm.", "shorter", "So.", "note", "more"]
    return Talk(
        session="x",
        log=own,
        sent=[["a0", "a1", "a2"], ["b0", "b1"]],
        got=[got, list(got)],
        fates=dict.fromkeys(("made", "a0", "a1", "a2", "b0"), "delivered") | {"b1": "returned"},
        history=[("assistant" if text.endswith(".") else "user", text) for text in said],
    )


def record(said: Talk) -> Record:
    first = [
        {"type": "started", "turn": 0, "attempt": 1},
        *block(0, 0, 1, "text", "Hm."),
        *block(1, 1, 2, "text", "So."),
        {"type": "completed", "turn": 1, "attempt": 2},
    ]
    logs = {RUN: first, NEXT: [{"type": "cancelled", "turn": 0, "attempt": 1}]}
    entries = {
        run: [Entry(f"{e['attempt']}-{n}", {"run": run, "seq": n, **e}) for n, e in enumerate(events)]
        for run, events in logs.items()
    }
    told = [Entry(f"{n}-0", {**event, "session": "x", "made": "m"}) for n, event in enumerate(said.log)]
    return msgspec.structs.replace(well(), logs=entries, talks=[said], topics={"sessions": [told]})


def told_again(said: Talk) -> None:
    said.log.append({**said.log[1], "session_seq": len(said.log)})


def _with_policies(said: Talk) -> Talk:
    """The same talk, with policies that judge what goes in."""
    msgspec.structs.force_setattr(said, "withheld_text", ("wörd7", "enough!"))
    for event in said.log:
        if event["type"] == "appended":
            event["item"]["judged"] = "input-1"
    return said


WRONG: dict[str, tuple[Callable[[Talk], object], str]] = {
    "an append that is not told": (lambda t: t.sent[0].append("a3"), "told 0 times"),
    "an append that is told twice": (told_again, "told 2 times"),
    "an append that nobody sent": (lambda t: t.sent[1].remove("b1"), "nobody sent"),
    "no fate": (lambda t: t.log.__setitem__(8, {**t.log[8], "type": "noted"}), "0 fates"),
    "another fate at the server": (lambda t: t.fates.update(b1="appended"), "the server answers"),
    "one writer's appends in another order": (lambda t: t.sent[0].reverse(), "accepted as"),
    "a gap": (lambda t: t.log[12].update(session_seq=13), "gaps"),
    "two runs at once": (lambda t: t.log[4].update(run=NEXT, run_seq=-1), "is open"),
    "a run without an end": (lambda t: t.log.pop(), "has no end"),
    "an end that is none": (lambda t: t.log[10].update(status="failed"), "not the end"),
    "a place beyond the run": (lambda t: t.log[3].update(run_seq=99), "no place"),
    "a reader without an event": (lambda t: t.got[1].pop(4), "reader 1 got"),
    "a reader with another order": (lambda t: t.got[0].insert(3, t.got[0].pop(6)), "reader 0 got"),
    "a message missing": (lambda t: t.history.pop(2), "the history is"),
    "a text that no policy judged": (lambda t: _with_policies(t).log[3]["item"].pop("judged"), "judged it in None"),
    "a text that policies reject": (lambda t: _with_policies(t).log[3]["item"].update(content="wörd7"), "not let pass"),
    "a text that policies rejected without a reason": (
        lambda t: _with_policies(t).log[8].update(reason="rejected", problem="boom"),
        "was rejected: boom",
    ),
    "other words": (lambda t: t.history.__setitem__(1, ("assistant", "Hm")), "the history is"),
}


def test_a_correct_session_is_correct() -> None:
    assert list(talks.judge(record(talk()))) == []


def test_a_session_with_a_message_that_policies_rejected_is_correct() -> None:
    said = _with_policies(talk())
    at = said.log[7]
    said.log[7:9] = [{**at, "type": "returned", "reason": "rejected", "problem": "rejected by a policy: stop"}]
    for n, event in enumerate(said.log):
        event["session_seq"] = n
    order = [e["append"] for e in said.log if e["type"] == "appended"]
    assert "b1" not in order
    for got in said.got:
        got[:] = ["0", "1", "2", *(f"{RUN}:{n}" for n in range(3)), *map(str, range(3, 9))]
        got += [*(f"{RUN}:{n}" for n in range(3, 10)), "9", "10", f"{NEXT}:0", "11"]
    assert list(talks.judge(record(said))) == []


@pytest.mark.parametrize("at", [slice(2, 3), slice(0, 0)])
def test_a_topic_that_is_not_as_the_log_is_reported(at: slice) -> None:
    told = record(talk())
    entries = told.topics["sessions"][0]
    entries[at] = [] if at.stop else [entries[0]]
    assert any("the topic has" in violation.what for violation in talks.judge(told))


@pytest.mark.parametrize("defect", WRONG)
def test_each_defect_is_reported(defect: str) -> None:
    break_it, what = WRONG[defect]
    said = talk()
    break_it(said)
    assert any(what in violation.what for violation in talks.judge(record(said)))

"""The judge of trees: it reports nothing for a correct tree, and each single defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.chaos.judging import trees
from tests.chaos.record import Entry, Record, Tree

ROOT, CHILD = "r", "r~0"


def of(run: str, *events: dict[str, Any]) -> list[Entry]:
    return [Entry(f"1-{n}", {"run": run, "seq": n, "turn": 0, "attempt": 1, **e}) for n, e in enumerate(events)]


def block(number: int, kind: str, content: str, **more: Any) -> list[dict[str, Any]]:
    about = {"block": number, "kind": kind, **more}
    whole = "arguments" if kind == "tool_call" else "content"
    return [{"type": "block_start", **about}, {"type": "block_complete", **about, whole: content}]


def well() -> Record:
    """A run with one child."""
    root = of(
        ROOT,
        {"type": "started"},
        *block(0, "tool_call", "{}", tool_id="t"),
        {"type": "child_started", "tool_id": "t", "child": CHILD},
        {"type": "child_ended", "child": CHILD, "status": "completed"},
        *block(1, "tool_result", "Here.", tool_id="t"),
        {"type": "completed"},
    )
    child = of(CHILD, {"type": "started"}, *block(0, "text", "Here."), {"type": "completed"})
    order = [(ROOT, "0-0 3 0"), (CHILD, "1-0 3"), (ROOT, "1-4 7")]
    got = [f"{ROOT}:{n}" for n in range(4)] + [f"{CHILD}:{n}" for n in range(4)] + [f"{ROOT}:{n}" for n in range(4, 8)]
    whole: dict[str, Any] = {"executions": [], "holders": [], "keys": [], "living": [], "stories": [], "topics": {}}
    logs = {ROOT: root, CHILD: child}
    return Record(
        seed="0", prefix="p", partitions=1, logs=logs, trees=[Tree(root=ROOT, order=order, got=[got])], **whole
    )


def change(record: Record, **fields: Any) -> None:
    record.trees[0] = msgspec.structs.replace(record.trees[0], **fields)


def other_words(record: Record) -> None:
    record.logs[ROOT][6].event["content"] = "Hers."


def a_second_child(record: Record) -> None:
    record.logs["r~1"] = of("r~1", {"type": "started"}, {"type": "completed"})


def an_end_that_is_not_its_own(record: Record) -> None:
    record.logs[ROOT][4].event["status"] = "cancelled"


def cancelled_alone(record: Record) -> None:
    record.logs[CHILD][-1].event["type"] = "cancelled"
    record.logs[ROOT][4].event["status"] = "cancelled"


def out_of_order(record: Record) -> None:
    root, child, end = record.trees[0].order
    change(record, order=[root, end, child])


def an_event_without_a_place(record: Record) -> None:
    change(record, order=record.trees[0].order[:2])


def a_reader_that_misses_one(record: Record) -> None:
    (got,) = record.trees[0].got
    assert got
    change(record, got=[got[:5] + got[6:]])


def a_reader_without_an_end(record: Record) -> None:
    change(record, got=[None])


def no_log(record: Record) -> None:
    record.logs.clear()


def test_a_correct_tree_has_no_violation() -> None:
    assert [*trees.judge(well())] == []


@pytest.mark.parametrize(
    "defect",
    [
        other_words,
        a_second_child,
        an_end_that_is_not_its_own,
        cancelled_alone,
        out_of_order,
        an_event_without_a_place,
        a_reader_that_misses_one,
        a_reader_without_an_end,
        no_log,
    ],
)
def test_each_defect_is_a_violation(defect: Callable[[Record], None]) -> None:
    record = well()
    defect(record)
    assert [*trees.judge(record)]

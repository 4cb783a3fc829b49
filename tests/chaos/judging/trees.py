"""Trees of runs: a call begins one run and gets its words, a run's end ends those below it, and all readers of the tree
got one order, with exactly the events of each log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.chaos.judging.story import kept
from tests.chaos.record import Record, Tree, Violation
from tests.e2e import judge as by_itself

Event = dict[str, Any]
Logs = dict[str, list[Event]]


def judge(record: Record) -> Iterator[Violation]:
    """Check each tree against the logs of its runs."""
    logs = {run: [entry.event for entry in log] for run, log in record.logs.items()}
    for tree in record.trees:
        of_tree = {run: log for run, log in logs.items() if log and run.partition("~")[0] == tree.root}
        for problem in _problems(tree, of_tree, lossy=record.lossy):
            yield Violation("trees", tree.root, problem)


def _problems(tree: Tree, logs: Logs, *, lossy: bool) -> Iterator[str]:
    if tree.root not in logs:
        if not lossy:
            yield "it has no log"
        return
    for run, log in logs.items():
        yield from _children(run, log, logs, lossy=lossy)
    if not lossy:  # a fail-over may lose a child that its parent knows, and the owner that would repair the order
        yield from _order(tree, logs)


def _children(run: str, log: list[Event], logs: Logs, *, lossy: bool) -> Iterator[str]:
    """What is wrong with the runs that this one began."""
    begun = [event["child"] for event in log if event["type"] == "child_started"]
    ended = {event["child"]: event for event in log if event["type"] == "child_ended"}
    if len(begun) != len(set(begun)):
        yield f"{run} began a run twice: {begun}"
    if not lossy and (strange := {each for each in logs if each.rpartition("~")[0] == run} - set(begun)):
        yield f"no call of {run} began {strange}"
    calls = {event["tool_id"]: event["child"] for event in log if event["type"] == "child_started"}
    for result in kept(log):
        child = logs.get(calls.get(result.get("tool_id"), ""), [])
        if result["kind"] == "tool_result" and not result.get("is_error") and child:
            words = "\n\n".join(block["content"] for block in kept(child) if block["kind"] == "text")
            if result["content"] != words:
                yield f"the result of {child[0]['run']} is {result['content']!r}, and it said {words!r}"
    if lossy:
        return
    for child in begun:
        log_of_child = logs.get(child, [])
        if child in ended and (not log_of_child or log_of_child[-1]["type"] != ended[child]["status"]):
            yield f"{child} ended {ended[child]['status']}, says its parent, and its log ends {log_of_child[-1:]}"
        if child not in ended and log[-1]["type"] == "completed":
            yield f"{run} completed, and {child} has not ended for it"
    if "~" in run and log[-1]["type"] == "cancelled":
        above = logs[run.rpartition("~")[0]]
        if above[-1]["type"] == "completed" or any(e.get("child") == run for e in above if e["type"] == "child_ended"):
            yield f"{run} was cancelled, and its parent goes on"


def _order(tree: Tree, logs: Logs) -> Iterator[str]:
    if len(logs) > 1 or tree.order:
        try:
            by_itself.check_tree(tree.order, logs)
        except AssertionError as e:
            yield f"its order: {str(e).partition(chr(10))[0]}"
            return
    placed = [
        f"{run}:{seq}"
        for run, value in tree.order
        for seq in range(int(value.split(" ")[0].rpartition("-")[2]), int(value.split(" ")[1]) + 1)
    ] or [f"{tree.root}:{event['seq']}" for event in logs[tree.root]]
    for n, got in enumerate(tree.got):
        if got is None:
            yield f"reader {n} did not reach the end"
        elif got != placed:
            at = next((i for i, (a, b) in enumerate(zip(got, placed, strict=False)) if a != b), len(got))
            yield f"reader {n} got {got[at:][:2]} from event {at} of {len(got)} on, and the order has {placed[at:][:2]}"

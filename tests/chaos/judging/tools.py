"""Tool calls: each call that counts ran at least once, one of its results was used, and nothing else ran."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.judging.story import kept
from tests.chaos.record import Line, Record, Violation

CANCELLED = "cancelled"
WORKERS_LOST = "the tool's worker was lost"
"""An error result for a call whose workers died one after the other."""
OVERDUE = "the tool returned no result within"
"""An error result for a call that kept its interpreter's lock, and for no other."""
NEVER_CAME = ("the tool's result never came", "the call was lost before a result came; it may have run")
"""Error results for a call that a fail-over lost, or whose result it lost."""


def judge(record: Record) -> Iterator[Violation]:
    """Check calls and results of the logs against the executions of the ledger."""
    executions: defaultdict[str, dict[str, Line]] = defaultdict(dict)
    for line in record.executions:
        executions[line.run][line.nonce] = line
    for run in executions.keys() - record.logs.keys():
        yield Violation("tools", run, "ran for a run that no client requested")
    holders: defaultdict[str, list[Line]] = defaultdict(list)
    for line in record.holders:
        holders[line.run].append(line)
    judged = {story.run for story in record.stories if story.guarded}
    trees = {tree.root for tree in record.trees}
    for run, entries in record.logs.items():
        if run.partition("~")[0] in trees:
            continue  # their calls begin runs: see `trees`
        log = [entry.event for entry in entries]
        name = _Names(run, by_what=run in judged)
        held = {name.of_line(line) for line in holders[run]}
        for problem in _of_run(name, log, executions[run], held, lossy=record.lossy):
            yield Violation("tools", run, problem)


class _Names:
    """The common name of a call and its executions: the number of its block; or its arguments if the run has policies,
    because subscribers see other block numbers than the model's.
    """

    def __init__(self, run: str, *, by_what: bool) -> None:
        self._run = run
        self._by_what = by_what

    def of_call(self, call: dict[str, Any]) -> str:
        which = _what(call) if self._by_what else call["block"]
        return f"{self._run}/{call['turn']}/{which}"

    def of_line(self, line: Line) -> str:
        return f"{line.key.rpartition('/')[0]}/{line.what}" if self._by_what else line.key


def _of_run(
    name: _Names, log: list[dict[str, Any]], executions: dict[str, Line], held: set[str], *, lossy: bool
) -> Iterator[str]:
    blocks = kept(log)
    calls = {b["tool_id"]: b for b in blocks if b["kind"] == "tool_call" and "tool_id" in b}
    results = [b for b in blocks if b["kind"] == "tool_result" and "tool_id" in b]
    for block in blocks:
        if block["kind"] in ("tool_call", "tool_result") and "tool_id" not in block:
            yield f"the {block['kind']} of block {block['block']} does not name its call"
    for tool_id, count in Counter(r["tool_id"] for r in results).items():
        if tool_id not in calls:
            yield f"a result for {tool_id}, which is not a call that counts"
        elif count > 1:
            yield f"{count} results for the call {tool_id}"
    of_call = {r["tool_id"]: r for r in results}
    if log and log[-1]["type"] == "completed":
        for tool_id in calls.keys() - of_call.keys():
            yield f"completed, and the call {tool_id} has no result"
    for result in results:
        if call := calls.get(result["tool_id"]):
            is_held = name.of_call(call) in held
            yield from _result(name, log[-1], call, result, executions, is_held=is_held, lossy=lossy)
    keys = {name.of_call(call): call for call in calls.values() if not call.get("cut")}
    for line in executions.values():
        call = keys.get(name.of_line(line))
        if call is None and lossy:
            continue  # the server lost the record of the call
        if call is None:
            yield f"{line.key} ran, and is not a complete call that counts"
        elif _what(call) != line.what:
            yield f"{line.key} ran with other arguments: {line.what}"


def _what(call: dict[str, Any]) -> str:
    """What the call asks for; all of its arguments if they are no longer valid."""
    try:
        return json.loads(call["arguments"])["what"]
    except ValueError:
        return call["arguments"]


def _result(
    name: _Names,
    end: dict[str, Any],
    call: dict[str, Any],
    result: dict[str, Any],
    executions: dict[str, Line],
    *,
    is_held: bool,
    lossy: bool,
) -> Iterator[str]:
    content: str = result["content"]
    if result.get("is_error"):
        # A run that ends gives its open calls the reason as their result.
        reason = CANCELLED if end["type"] == "cancelled" else end.get("error", {}).get("message")
        stands_in = content == reason or content.startswith(WORKERS_LOST) or (lossy and content in NEVER_CAME)
        if not stands_in and not (is_held and content.startswith(OVERDUE)):
            yield f"the call {result['tool_id']} gave an error: {content}"
        return
    if result.get("cut") and end["type"] != "completed":
        return  # the run ended while its policies had released the beginning of this result
    try:
        nonce: str = json.loads(content)["nonce"]
    except (ValueError, LookupError, TypeError):
        yield f"a result that no execution gave: {content!r}"
        return
    line = executions.get(nonce)
    if line is None:
        yield f"a result that no execution gave: {content}"
    elif name.of_line(line) != name.of_call(call):
        yield f"the call {name.of_call(call)} got the result of {name.of_line(line)}"

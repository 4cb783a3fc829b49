"""The judge itself: it reports nothing for a correct round, and each single defect."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest

from tests.chaos.judging import judge, tools
from tests.chaos.judging.topics import HOLDS
from tests.chaos.record import Change, Entry, Exit, Guarded, KeyFact, Line, Piece, Record, Story, Visit

ROOT = Path(__file__).parents[2]
RUN = "r"
RESULT = '{"what":"here","nonce":"n1"}'
PARTITION = crc32(RUN.encode()) % 2


def well() -> Record:
    """One correct run with one call."""
    call = '{"what":"here"}'
    story = Story(
        run=RUN,
        provider="anthropic",
        mode="chat",
        stream=True,
        on_failure="restart",
        fate="plain",
        pieces=(Piece(0, "text", "Hm."), Piece(0, "tool_call", call), Piece(1, "text", "So: {tool_result}")),
    )
    events = [
        {"type": "started", "turn": 0, "attempt": 1},
        *block(0, 0, 1, "text", "Hm."),
        *block(1, 0, 1, "tool_call", call, tool_id="t"),
        *block(2, 0, 1, "tool_result", RESULT, tool_id="t"),
        *block(3, 1, 2, "text", f"So: {RESULT}"),
        {"type": "completed", "turn": 1, "attempt": 2},
    ]
    log = [Entry(f"{e['attempt']}-{n}", {"run": RUN, "seq": n, **e}) for n, e in enumerate(events)]
    return Record(
        seed="0",
        prefix="p",
        partitions=2,
        stories=[story],
        logs={RUN: log},
        topics={
            topic: [[e for e in log if holds(e.event)] if n == PARTITION else [] for n in range(2)]
            for topic, holds in HOLDS.items()
        }
        | {"decisions": [[], []]},
        executions=[Line(RUN, f"{RUN}/0/1", "here", "n1")],
        holders=[],
        keys=[
            KeyFact("requests", "stream", -1, 0, {"intake": 0}),
            KeyFact("{0}:run:r", "hash", 1000, 5),
            KeyFact(
                "{0}:lease:parser", "hash", -1, 6, fields={"owner": "host-7-0a0b0c0d", "arrived": "5", "done": "5"}
            ),
            KeyFact(f"{{{PARTITION}}}:log:r", "stream", 1000, len(log)),
        ],
        living=[7],
        exits=[Exit("parser", 7, 15, 0, True, "0-parser.log"), Exit("parser", 8, 9, -9, True, "1-parser.log")],
    )


def block(number: int, turn: int, attempt: int, kind: str, whole: str, **more: Any) -> list[dict[str, Any]]:
    about = {"turn": turn, "attempt": attempt, "block": number, "kind": kind, **more}
    name = "arguments" if kind == "tool_call" else "content"
    return [
        {"type": "block_start", **about},
        {"type": "chunk", **about, "text": whole[:2], "visible": kind == "text"},
        {"type": "chunk", **about, "text": whole[2:], "visible": kind == "text"},
        {"type": "block_complete", **about, name: whole},
    ]


def log(record: Record) -> list[Entry]:
    return record.logs[RUN]


def event(record: Record, n: int, **changes: Any) -> None:
    """Change an event in the log and in the topics."""
    log(record)[n].event.update(changes)


def without_end(record: Record) -> None:
    del log(record)[-1], record.topics["runs"][PARTITION][-1]


def both(record: Record, n: int) -> None:
    """Remove a chunk from the log and from the topics."""
    gone = log(record).pop(n)
    for topic in ("visible", "chunks"):
        record.topics[topic][PARTITION].remove(gone)


def renumbered(record: Record, n: int) -> None:
    """Remove it, and renumber the rest."""
    both(record, n)
    for seq, entry in enumerate(log(record)):
        entry.event["seq"] = seq


def twice(record: Record, at: int) -> None:
    log(record).insert(at, copy.deepcopy(log(record)[at]))


def swapped(entries: list[Entry]) -> None:
    entries[0], entries[1] = entries[1], entries[0]


def key(name: str, **fields: Any) -> Callable[[Record], None]:
    return lambda record: record.keys.append(
        KeyFact(**{"name": name, "type": "stream", "ttl_ms": -1, "length": 1, **fields})
    )


def ended(
    requested: int | None, status: int, ready: bool = True, task_fault_s: float | None = None
) -> Callable[[Record], None]:
    return lambda record: record.exits.append(Exit("tools", 9, requested, status, ready, "2-tools.log", task_fault_s))


def changed(placing: int = 5, fresh: tuple[str, ...] = (RUN,)) -> Callable[[Record], None]:
    """The record of a change to five partitions; `RUN` began after it."""

    def change(record: Record) -> None:
        record.change = Change(5, placing, list(fresh))

    return change


def by(*faults: str) -> Callable[[Record], None]:
    """The round had these faults alone."""
    return lambda record: record.faults.update(dict.fromkeys(faults, 1))


def visited(kind: str, outcome: Any, **more: Any) -> Callable[[Record], None]:
    return lambda record: record.visits.append(Visit(kind, outcome, **more))


WRONG: dict[str, tuple[str, Callable[[Record], object]]] = {
    "no end": ("every run ends", without_end),
    "in two partitions": ("places", key(f"{{{1 - PARTITION}}}:log:r", ttl_ms=1000)),
    "in a partition that no number gives": ("places", key("{7}:log:other", ttl_ms=1000)),
    "placed by the old number": ("places", changed()),
    "a change that is not finished": ("places", changed(placing=2)),
    "a change after which nothing is placed": ("places", changed(fresh=())),
    "a client with a silent end": ("crowd", visited("chat", "silent end")),
    "a client that hangs": ("crowd", visited("messages", "hangs")),
    "a client that cannot resume": ("crowd", visited("responses", "an error")),
    "a client that missed an event": ("crowd", visited("native", "resumed", run=RUN, seqs=[0, 1, 3])),
    "a chunk lost": ("log", lambda r: both(r, 2)),
    "a chunk lost without a gap": ("log", lambda r: renumbered(r, 2)),
    "an event doubled": ("log", lambda r: twice(r, 2)),
    "out of order": ("log", lambda r: swapped(log(r))),
    "an event after the end": ("log", lambda r: twice(r, len(log(r)) - 1)),
    "an entry id that is not its seq": ("log", lambda r: log(r).__setitem__(0, Entry("9-9", log(r)[0].event))),
    "a block with other content": ("content", lambda r: r.stories.__setitem__(0, with_text(r, "Ah."))),
    "an outcome that the policy does not allow": (
        "outcome",
        lambda r: event(r, len(log(r)) - 1, type="incomplete", error={"retryable": True}),
    ),
    "cancelled without a request": ("outcome", lambda r: event(r, len(log(r)) - 1, type="cancelled")),
    "a topic lacks an event": ("topics", lambda r: r.topics["visible"][PARTITION].pop()),
    "a topic has an event twice": ("topics", lambda r: r.topics["blocks"][PARTITION].append(log(r)[1])),
    "a topic out of order": ("topics", lambda r: swapped(r.topics["chunks"][PARTITION])),
    "a topic in the wrong partition": ("topics", lambda r: r.topics["runs"].reverse()),
    "a result that no execution gave": ("tools", lambda r: r.executions.clear()),
    "an execution without a call": ("tools", lambda r: r.executions.append(Line(RUN, f"{RUN}/0/7", "x", "n2"))),
    "an execution for an unknown run": ("tools", lambda r: r.executions.append(Line("x", "x/0/1", "x", "n2"))),
    "other arguments": ("tools", lambda r: r.executions.__setitem__(0, Line(RUN, f"{RUN}/0/1", "there", "n1"))),
    "another call's result": ("tools", lambda r: r.executions.__setitem__(0, Line(RUN, f"{RUN}/0/7", "here", "n1"))),
    "a key without TTL": ("keys", key("{0}:log:r")),
    "an unknown key": ("keys", key("{0}:mystery")),
    "work left": ("keys", key("{0}:turns")),
    "an input that is not trimmed": ("keys", key("{0}:raw", length=5000)),
    "an entry pending": ("pending", key("{0}:turns", length=0, pending={"fetcher": 1})),
    "a lease of a dead worker": ("leases", lambda r: r.living.clear()),
    "bytes that were not consumed": ("leases", lambda r: r.keys[2].fields.update(done="4")),
    "a lease that outlives its worker": ("leases", lambda r: r.keys_after.append(r.keys[2])),
    "a worker that ended by itself": ("workers", ended(None, 1)),
    "a worker that lost its server": ("workers", ended(None, 3)),
    "a worker that continues after a fault in a task": ("workers", ended(15, 0, task_fault_s=60.0)),
    "a worker that exits with another code after a fault in a task": ("workers", ended(None, 1, task_fault_s=0.5)),
    "a run still open long after the last fault": ("late", lambda r: r.late.update({RUN: 30.0})),
    "a hostile provider's run completed": (
        "outcome",
        lambda r: r.stories.__setitem__(0, msgspec.structs.replace(r.stories[0], fate="hostile")),
    ),
    "a huge request that a worker took": (
        "outcome",
        lambda r: r.stories.__setitem__(0, msgspec.structs.replace(r.stories[0], fate="huge")),
    ),
    "poison where none was": ("keys", key("dead")),
    "more poison than was sent": ("keys", lambda r: (setattr(r, "huge_requests", 1), key("dead", length=2)(r))),
    "a full server that stays full": ("room", lambda r: r.without_room.append("no room was made")),
    "a worker that ended as the server was slow": (
        "workers",
        lambda r: (by("each round trip to the server takes seconds")(r), ended(None, 7)(r)),
    ),
    "a provider that is blamed for a worker that stood": (
        "blame",
        lambda r: (by("SIGSTOP of every fetcher")(r), ended_by(r, "failed", "idle_timeout")),
    ),
    "a run that waited for a huge request": (
        "delayed",
        lambda r: (by("a request of 60 MiB")(r), r.delays.update({RUN: 60.0})),
    ),
    "a worker that did not stop": ("workers", ended(15, -9)),
    "an error in a log": ("workers", lambda r: r.complaints.append("left behind: tasks")),
    "a socket to the provider": ("sockets", lambda r: setattr(r, "provider_connections", 1)),
    "a socket to the server": ("sockets", lambda r: setattr(r, "server_connections", 1)),
}


def guarded() -> Record:
    """A correct run under policies: one text was changed, and one of two calls was blocked."""
    record = well()
    [story] = record.stories
    blocked = '{"what":"there"}'
    events = [
        {"type": "started", "turn": 0, "attempt": 1},
        *block(0, 0, 1, "text", "H[m]."),
        *block(1, 0, 1, "tool_call", '{"what":"here"}', tool_id="t"),
        *block(2, 0, 1, "tool_result", RESULT, tool_id="t"),
        *block(3, 1, 2, "text", f"So: {RESULT} not that"),
        {"type": "completed", "turn": 1, "attempt": 2},
    ]
    log = [Entry(f"{e['attempt']}-{n}", {"run": RUN, "seq": n, **e}) for n, e in enumerate(events)]
    topics = {
        topic: [[e for e in log if holds(e.event)] if n == PARTITION else [] for n in range(2)]
        for topic, holds in HOLDS.items()
    }
    decisions = [
        {"policy": "mask", "action": "replace", "block": 0, "original": "Hm.", "final": "H[m]."},
        {"policy": "gate", "action": "block", "block": 2, "original": blocked},
    ]
    entries = [Entry(f"{n}-0", {"run": RUN, "n": n, "turn": 0, **d}) for n, d in enumerate(decisions)]
    pieces = (Piece(0, "text", "H[m]."), story.pieces[1], story.pieces[2])
    due = Guarded(
        chain=("mask", "gate"),
        blocked=(Piece(0, "tool_call", blocked),),
        changed=pieces[:1],
        reason="not that",
        withheld_text=("Hm.", '"there"'),
        stopped=False,
    )
    return msgspec.structs.replace(
        record,
        stories=[msgspec.structs.replace(story, pieces=pieces, guarded=due)],
        logs={RUN: log},
        topics={**topics, "decisions": [entries if n == PARTITION else [] for n in range(2)]},
    )


def decisions(record: Record) -> list[Entry]:
    return record.topics["decisions"][PARTITION]


def due(record: Record, **changes: Any) -> None:
    """Change the expected effect of its policies on the run."""
    [story] = record.stories
    assert story.guarded
    record.stories[0] = msgspec.structs.replace(story, guarded=msgspec.structs.replace(story.guarded, **changes))


def of_none(record: Record) -> None:
    record.stories[0] = msgspec.structs.replace(record.stories[0], guarded=None)


WRONG_UNDER_POLICIES: dict[str, tuple[str, Callable[[Record], object]]] = {
    "a withheld word": ("policies", lambda r: event(r, 2, text="Hm.")),
    "a withheld word in two chunks": ("policies", lambda r: (event(r, 2, text="H"), event(r, 3, text="m."))),
    "a blocked call that ran": ("policies", lambda r: r.executions.append(Line(RUN, f"{RUN}/0/2", "there", "n2"))),
    "a blocked call whose reason the model never read": ("content", lambda r: due(r, reason="never said")),
    "a decision twice": ("decisions", lambda r: decisions(r).append(decisions(r)[0])),
    "a numbered decision on a call twice": (
        "decisions",
        lambda r: decisions(r).append(Entry("2-0", {**decisions(r)[1].event, "n": 2})),
    ),
    "a lost decision on a text": ("decisions", lambda r: decisions(r).__setitem__(0, with_another_final(r))),
    "a lost decision on a call": ("decisions", lambda r: decisions(r).pop()),
    "decisions that begin in the middle": ("decisions", lambda r: decisions(r).pop(0)),
    "a decision in the wrong partition": ("decisions", lambda r: r.topics["decisions"].reverse()),
    "decisions on a run without policies": ("decisions", of_none),
    "a policy that failed": ("decisions", lambda r: decisions(r)[1].event.update(action="error")),
    "a blocked call that policies allow": ("decisions", lambda r: decisions(r)[1].event.update(original="{}")),
    "an end that no policy sets": ("outcome", lambda r: ended_by(r, "incomplete", "policy_terminated")),
    "no end although a policy sets one": ("outcome", lambda r: due(r, stopped=True)),
    "nobody judged": ("outcome", lambda r: ended_by(r, "failed", "policy_silent")),
}


def with_another_final(record: Record) -> Entry:
    return Entry("0-0", {**decisions(record)[0].event, "final": "Hm?"})


def ended_by(record: Record, how: str, code: str) -> None:
    event(record, len(log(record)) - 1, type=how, finish="content_filter", error={"code": code, "retryable": True})


def with_text(record: Record, text: str) -> Story:
    story = record.stories[0]
    return msgspec.structs.replace(story, pieces=(Piece(0, "text", text), *story.pieces[1:]))


def test_a_correct_round_has_no_violation():
    assert judge(well()) == []


@pytest.mark.parametrize("wrong", WRONG)
def test_the_judge_reports_each_defect(wrong: str):
    rule, break_it = WRONG[wrong]
    record = well()
    break_it(record)
    assert rule in {violation.rule for violation in judge(record)}


def test_only_the_end_of_its_run_may_cut_a_result():
    record = guarded()
    event(record, 12, content="", cut=True)
    [problem] = tools.judge(record)
    assert "no execution gave" in problem.what
    event(record, len(log(record)) - 1, type="cancelled")
    assert list(tools.judge(record)) == []


def test_only_a_call_that_held_its_interpreters_lock_may_be_overdue():
    record = well()
    ends = [e.event for e in log(record) if e.event["type"] == "block_complete" and e.event["kind"] == "tool_result"]
    for end in ends:
        end.update(content=f"{tools.OVERDUE} 20 s", is_error=True)
    [problem] = tools.judge(record)
    assert "gave an error" in problem.what
    record.holders.append(Line(RUN, f"{RUN}/0/1", "here", "n9"))
    assert list(tools.judge(record)) == []


def test_a_worker_may_report_a_request_that_is_larger_than_it_reads():
    record = well()
    record.complaints.append("0-fetcher.log: a value of 125829229 bytes: at most 100663296 are read")
    assert [violation.rule for violation in judge(record)] == ["workers"]
    record.huge_requests = 1
    assert judge(record) == []


@pytest.mark.parametrize("fault", ["kill -9 of a parser", "SIGSTOP of a parser"])
def test_a_run_may_be_delayed_by_faults_that_delay_every_run(fault: str):
    record = well()
    by(fault, "a request of 60 MiB")(record)
    record.delays[RUN] = 60.0
    assert judge(record) == []


@pytest.mark.parametrize(("stood_s", "blamed"), [(0.4, True), (0.5, False)])
def test_a_provider_may_be_silent_only_if_its_own_process_stood(stood_s: float, blamed: bool):
    record = well()
    by("tool calls that may hold the lock")(record)
    event(record, 3, error={"code": "idle_timeout"})
    record.provider_stood_s = stood_s
    assert ("blame" in {violation.rule for violation in judge(record)}) == blamed


def test_a_correct_run_under_policies_has_no_violation():
    assert judge(guarded()) == []


@pytest.mark.parametrize("wrong", WRONG_UNDER_POLICIES)
def test_the_judge_reports_each_defect_under_policies(wrong: str):
    rule, break_it = WRONG_UNDER_POLICIES[wrong]
    record = guarded()
    break_it(record)
    assert rule in {violation.rule for violation in judge(record)}


def test_a_worker_that_found_no_server_at_its_start_may_exit():
    record = well()
    ended(None, 3, ready=False)(record)
    assert judge(record) == []


@pytest.mark.parametrize(("requested", "status", "task_fault_s"), [(None, 7, 3.0), (None, 7, None), (15, 0, 2.0)])
def test_a_worker_that_could_not_continue_may_exit(requested: int | None, status: int, task_fault_s: float | None):
    record = well()
    ended(requested, status, task_fault_s=task_fault_s)(record)
    assert judge(record) == []


def test_a_client_may_wait_for_a_response_whose_request_a_fail_over_lost_and_for_no_other():
    def judged(run: str, *, lossy: bool) -> bool:
        record = well()
        visited("responses", "hangs", run=run)(record)
        return "crowd" in {v.rule for v in judge(msgspec.structs.replace(record, lossy=lossy))}

    assert not judged("lost", lossy=True)
    assert judged("lost", lossy=False)
    assert judged(next(iter(well().logs)), lossy=True)
    assert judged("", lossy=True)


def test_the_judge_imports_none_of_the_code_that_it_judges():
    look = "import sys, tests.chaos.judging; sys.exit(any(name.startswith('tokenbus') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0

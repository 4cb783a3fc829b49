"""Sessions: every append is told once and has one fate; one run is open at a time; all readers got one order; the
history is what a plain reading of the logs gives; and the log has no text that policies reject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from tests.chaos.judging.story import kept
from tests.chaos.record import Record, Talk, Violation

Event = dict[str, Any]
Logs = dict[str, list[Event]]


def judge(record: Record) -> Iterator[Violation]:
    """Check each session by itself and against the logs of its runs."""
    logs = {run: [entry.event for entry in log] for run, log in record.logs.items()}
    for talk in record.talks:
        for problem in (*problems_of(talk, logs, lossy=record.lossy), *_on_topic(talk, record)):
            yield Violation("talks", talk.session, problem)


def _on_topic(talk: Talk, record: Record) -> Iterator[str]:
    """The topic has each event once, in order: what one script writes, no fail-over takes apart."""
    entries = [entry.event for part in record.topics["sessions"] for entry in part]
    of = [{k: v for k, v in e.items() if k not in ("session", "made")} for e in entries if e["session"] == talk.session]
    if of != talk.log:
        yield f"the topic has {len(of)} events {of[-1:]}, the log {len(talk.log)} {talk.log[-1:]}"


def problems_of(talk: Talk, logs: Logs, *, lossy: bool) -> list[str]:
    """What is wrong with a session. ``logs``: those of its runs, and maybe more; ``lossy``: its server may have lost
    writes.
    """
    problems = [*_appends(talk, lossy=lossy), *_runs(talk, logs), *_judged(talk)]
    return problems if problems or lossy else [*_order(talk, logs), *_history(talk, logs)]


def _appends(talk: Talk, *, lossy: bool) -> Iterator[str]:
    seqs = [event["session_seq"] for event in talk.log]
    if seqs != list(range(len(seqs))):
        yield f"session_seq has gaps or doubles: {seqs}"
    told = Counter(event["append"] for event in talk.log if event["type"] in ("configured", "appended"))
    ended = Counter(event["append"] for event in talk.log if event["type"] in ("delivered", "returned"))
    ended["made"] += 1
    sent = ["made", *(append for each in talk.sent for append in each)]
    rejected = _rejected(talk)
    told.update(rejected.keys())  # the log has a fate of it, and no text
    for append in sent:
        if told[append] != 1 and not (lossy and not told[append]):
            yield f"{append} is told {told[append]} times"
        if ended[append] != told[append] and not (lossy and not told[append]):
            yield f"{append} has {ended[append]} fates"
    if strange := told.keys() - set(sent):
        yield f"nobody sent {strange}"
    if not lossy:
        fates = {event["append"]: event["type"] for event in talk.log if event["type"] in ("delivered", "returned")}
        if talk.fates != {**fates, "made": "delivered"}:
            yield f"the server answers {talk.fates}, the log tells {fates}"
        for each in talk.sent:
            order = [e["append"] for e in talk.log if e["type"] == "appended" and e["append"] in each]
            if order != [append for append in each if append not in rejected]:
                yield f"one writer sent {each}, and it was accepted as {order}"


def _rejected(talk: Talk) -> dict[str, str]:
    """By append: why policies rejected it."""
    returned = (event for event in talk.log if event["type"] == "returned" and event.get("reason") == "rejected")
    return {event["append"]: event.get("problem", "") for event in returned}


def _judged(talk: Talk) -> Iterator[str]:
    """What policies let pass is in the log, as they left it, and nothing else."""
    for event in talk.log:
        item = event.get("item", {}) if event["type"] == "appended" else {}
        if item.get("type") != "message":
            continue
        if bool(talk.withheld_text) != bool(item.get("judged")):
            yield f"{event['append']} says that policies judged it in {item.get('judged')}"
        if any(word in item["content"] for word in talk.withheld_text):
            yield f"{event['append']} has a text that its policies do not let pass: {item['content']}"
    for append, problem in _rejected(talk).items():
        if not talk.withheld_text or not problem.startswith(("rejected by a policy: stop", "no policy worker")):
            yield f"{append} was rejected: {problem}"


def _runs(talk: Talk, logs: Logs) -> Iterator[str]:
    """One is open at a time, each begins with a message and ends once, and places are in its log."""
    open_run, seen = "", list[str]()
    for event in talk.log:
        run = event.get("run", "")
        if run and run != open_run:
            if open_run or run in seen or event["type"] != "delivered":
                yield f"run {run} begins with {event}, while {open_run or 'none'} is open"
            open_run = run
            seen.append(run)
        if run and not -1 <= event["run_seq"] < len(logs.get(run, [])):
            yield f"{event} is at no place of its run, which has {len(logs.get(run, []))} events"
        if event["type"] == "run_ended":
            log = logs.get(run, [])
            if not log or event["run_seq"] != log[-1]["seq"] or log[-1]["type"] != event["status"]:
                yield f"{event} is not the end of its run: {log[-1:]}"
            open_run = ""
    if open_run:
        yield f"run {open_run} has no end"
    if [int(run.rpartition(".")[2]) for run in seen] != list(range(len(seen))):
        yield f"the runs are {seen}"


def _order(talk: Talk, logs: Logs) -> Iterator[str]:
    """What readers got is the session's events, and those of its runs where the session's say that they are."""
    expected: list[str] = []
    run, at = "", 0
    for event in talk.log:
        if (of := event.get("run", "")) != run and of:
            run, at = of, 0
        if of:
            expected += [f"{run}:{e['seq']}" for e in logs[run][at : event["run_seq"] + 1]]
            at = max(at, event["run_seq"] + 1)
        expected.append(str(event["session_seq"]))
    for n, got in enumerate(talk.got):
        if got != expected:
            at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False)))
            there = f"{got[at : at + 3]}, not {expected[at : at + 3]}"
            yield f"reader {n} got {len(got)} of {len(expected)} events; from {at} on {there}"


def _history(talk: Talk, logs: Logs) -> Iterator[str]:
    """The messages, read from the logs alone."""
    items = {event["append"]: event["item"] for event in talk.log if event["type"] == "appended"}
    begun: dict[str, list[str]] = {}
    steers: dict[str, list[tuple[int, str]]] = {}
    history: list[tuple[str, str]] = []
    added: list[tuple[str, str]] = []
    """Behind the open run."""
    open_run = ""
    for event in talk.log:
        item = items.get(event.get("append", ""), {})
        if event["type"] == "delivered" and item.get("type") == "message":
            run = event.get("run", "")
            if not item.get("run", True):
                added.append(("user", item["content"]))
            elif run != open_run:
                open_run, begun[run] = run, [item["content"]]
                history += added
                added = []
            else:
                steers.setdefault(run, []).append((event["turn"], item["content"]))
        elif event["type"] == "run_ended":
            run, open_run = event["run"], ""
            history += [("user", text) for text in begun[run]]
            blocks = [block for block in kept(logs[run]) if block["kind"] == "text"]
            turns = {block["turn"] for block in blocks} | {turn for turn, _ in steers.get(run, [])}
            for turn in sorted(turns):
                history += [("user", text) for at, text in steers.get(run, []) if at == turn]
                text = "".join(block["content"] for block in blocks if block["turn"] == turn)
                history += [("assistant", text)] if text else []
    if [*history, *added] != [tuple(message) for message in talk.history]:
        yield f"the history is {talk.history}, and the logs say {[*history, *added]}"

"""Policies: withheld output is never published and never runs; each decision on published text appears once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tests.chaos.judging.story import RESULTS, TERMINATED
from tests.chaos.record import Guarded, Line, Record, Violation

Event = dict[str, Any]

INPUT = "input-"
"""How the runs begin in which policies judge what goes in."""


def judge(record: Record) -> Iterator[Violation]:
    """Check the runs with policies; and that no policy touched any other run."""
    guards = {story.run: story.guarded for story in record.stories}
    decided: defaultdict[str, list[Event]] = defaultdict(list)
    home = record.homes()
    for partition, entries in enumerate(record.topics["decisions"]):
        for entry in entries:
            run: str = entry.event["run"]
            decided[run].append(entry.event)
            if home(run) != partition:
                yield Violation("decisions", run, f"in partition {partition}")
    for run in decided.keys() - {run for run, guarded in guards.items() if guarded}:
        if run.startswith(INPUT):  # of what goes into a session
            continue
        yield Violation("decisions", run, f"of a run without policies: {decided[run][0]}")
    published = _published(record)
    ran: defaultdict[str, list[Line]] = defaultdict(list)
    for line in record.executions:
        ran[line.run].append(line)
    for run, guarded in guards.items():
        if not guarded:
            continue
        for problem in _held_back(guarded, published[run], ran[run]):
            yield Violation("policies", run, problem)
        log = [entry.event for entry in record.logs[run]]
        for problem in _decisions(guarded, log, decided[run], lossy=record.lossy):
            yield Violation("decisions", run, problem)


def _published(record: Record) -> dict[str, dict[str, str]]:
    """All published content, by run and place: each block of each topic, and all other fields of events."""
    published: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    topics = {topic: chain(*parts) for topic, parts in record.topics.items() if topic not in ("decisions", "sessions")}
    for place, entries in {**topics, "the log": chain(*record.logs.values())}.items():
        for entry in entries:
            event = entry.event
            of_run = published[event["run"]]
            if event["type"] == "chunk":
                of_run[f"{place}, chunks of block {event['block']}"].append(event["text"])
            else:
                texts = [value for value in event.values() if isinstance(value, str)]
                of_run[f"{place}, seq {event['seq']}"].append("\n".join(texts))
    return defaultdict(dict, {run: {at: "".join(pieces) for at, pieces in of.items()} for run, of in published.items()})


def _held_back(guarded: Guarded, published: dict[str, str], ran: list[Line]) -> Iterator[str]:
    for at, text in published.items():
        for word in guarded.withheld_text:
            if word in text:
                yield f"{word} is published: {at}"
    for line in ran:
        if f'"{line.what}"' in guarded.withheld_text:
            yield f"{line.what} ran, and no policy allowed it so"


def _decisions(guarded: Guarded, log: list[Event], decided: list[Event], *, lossy: bool) -> Iterator[str]:
    numbers = [each["n"] for each in decided]
    if numbers != list(range(len(decided))):
        yield f"decisions are numbered {numbers}"
    of_blocks = Counter((d["policy"], d["block"]) for d in decided if "block" in d)
    for (policy, block), count in of_blocks.items():
        if count > 1:
            yield f"{policy} decided {count} times on block {block}"
    blocked = [piece.whole for piece in guarded.blocked]
    for each in decided:
        if each["action"] == "error" and not lossy and each["policy"] not in guarded.may_fail:
            yield f"a policy failed: {each}"
        if each["action"] == "block" and each["original"] not in blocked:
            yield f"a policy blocked what it should allow: {each}"
    end = log[-1] if log else {}
    ended = [d["policy"] for d in decided if d["action"] == "terminate"]
    if len(ended) != (end.get("error", {}).get("code") == TERMINATED):
        yield f"ended by {ended}, and the run's end is {end}"
    if end.get("type") == "completed":
        for piece in guarded.blocked:
            if not any(d["action"] == "block" and d["original"] == piece.whole for d in decided):
                yield f"no policy decided to block {piece.whole}"
    elif lossy:
        return
    finals = Counter(d["final"] for d in decided if d["action"] == "replace")
    published = Counter(
        (whole, bool(event.get("cut")))
        for event in log
        if event["type"] == "block_complete"
        and (event.get("cut") or _is_changed(guarded, event))
        and (whole := _whole(event))
    )
    for whole in {whole for whole, cut in published if not cut}:
        surely, perhaps = (
            published[whole, False],
            published[whole, True],
        )  # a cut text may have been cut after the policies' decisions
        if not surely <= finals[whole] <= surely + perhaps:
            yield f"decided {finals[whole]} times, and published {surely} times: {whole!r}"


def _whole(block: Event) -> str:
    return block["arguments"] if block["kind"] == "tool_call" else block.get("content", "")


def _is_changed(guarded: Guarded, block: Event) -> bool:
    return any(
        (piece.kind, piece.turn) == (block["kind"], block["turn"])
        and _whole(block).startswith(piece.whole.partition(RESULTS)[0])
        for piece in guarded.changed
    )

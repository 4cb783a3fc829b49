"""The public topics: each holds, for every run, exactly the events of that topic's kinds in its
log, in the same order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from tests.chaos.record import Record, Violation

Event = dict[str, Any]

OF_BLOCKS = ("block_start", "block_complete", "tool_progress")
HOLDS: dict[str, Callable[[Event], bool]] = {
    "visible": lambda e: e["type"] == "chunk" and e["visible"],
    "chunks": lambda e: e["type"] == "chunk",
    "blocks": lambda e: e["type"] in OF_BLOCKS,
    "runs": lambda e: e["type"] not in ("chunk", *OF_BLOCKS),
}


def judge(record: Record) -> Iterator[Violation]:
    """Compare topics with logs."""
    home = record.homes()
    for topic, holds in HOLDS.items():
        published: defaultdict[str, list[Event]] = defaultdict(list)
        for partition, entries in enumerate(record.topics[topic]):
            for entry in entries:
                run: str = entry.event["run"]
                published[run].append(entry.event)
                if home(run) != partition:
                    yield Violation("topics", run, f"{topic}: in partition {partition}")
        for run in published.keys() - record.logs.keys():
            yield Violation("topics", run, f"{topic}: a run that no client requested")
        for run, entries in record.logs.items():
            logged = [entry.event for entry in entries if holds(entry.event)]
            if published[run] != logged:
                yield Violation("topics", run, f"{topic}: {_difference(published[run], logged)}")


def _difference(published: list[Event], logged: list[Event]) -> str:
    at = next(
        (n for n, (a, b) in enumerate(zip(published, logged, strict=False)) if a != b), min(len(published), len(logged))
    )
    first = f"{published[at : at + 1]} {logged[at : at + 1]}"
    return f"{len(published)} events, the log has {len(logged)}; they differ from event {at} on: {first}"

"""Each log by itself: `seq` without a gap, order, whole blocks, one terminal event and nothing after it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.record import Record, Violation
from tests.e2e import judge as by_itself


def judge(record: Record) -> Iterator[Violation]:
    """Apply the rules of one log to all logs."""
    for run, entries in record.logs.items():
        events = [entry.event for entry in entries]
        if not events or events[-1]["type"] not in by_itself.TERMINAL:
            yield Violation("every run ends", run, f"{len(events)} events, the last: {events[-1:]}")
            continue
        try:
            by_itself.check(events)
        except AssertionError as e:
            yield Violation("log", run, str(e).partition("\n")[0])
        if any(event["run"] != run for event in events):
            yield Violation("log", run, "holds events of another run")
        if [entry.id for entry in entries] != [f"{e['attempt']}-{e['seq']}" for e in events]:
            yield Violation("log", run, "entry ids are not <attempt>-<seq>")

"""Clients of gateways: none has a silent end, none hangs, and those that can resume have received the whole log."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.record import Record, Violation

RESUMABLE = ("native", "responses")


def judge(record: Record) -> Iterator[Violation]:
    """Check each client by itself, and those of the native protocol against the log of their run."""
    for visit in record.visits:
        if visit.outcome == "hangs" and record.lossy and visit.run and visit.run not in record.logs:
            continue  # a fail-over lost the request: each new reader of the response waits a minute for its run
        if visit.outcome in ("silent end", "hangs"):
            yield Violation("crowd", visit.run, f"{visit.kind}: {visit.outcome} {visit.what}")
        elif visit.outcome == "an error" and visit.kind in RESUMABLE and not record.lossy:
            yield Violation("crowd", visit.run, f"{visit.kind}: could not resume: {visit.what}")
        elif visit.kind == "native" and visit.outcome != "an error":
            logged = [entry.event["seq"] for entry in record.logs.get(visit.run, [])]
            if visit.seqs != logged and not record.lossy:
                yield Violation("crowd", visit.run, f"native: received {visit.seqs}, the log has {logged}")

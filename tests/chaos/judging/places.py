"""Placement of runs: each run is in one partition, by a number of partitions that the deployment had; new runs are
placed by the new number.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.record import Record, Violation, place


def judge(record: Record) -> Iterator[Violation]:
    """Check the partitions of all runs that left a log, and that a repartition finished."""
    numbers = [record.partitions, *([record.change.number] if record.change else [])]
    for run, partitions in record.placed.items():
        if len(partitions) != 1:
            yield Violation("places", run, f"is in partitions {partitions}")
        if outside := set(partitions) - {place(run, number) for number in numbers}:
            yield Violation("places", run, f"is in partition {outside}, which follows from none of {numbers}")
    if not record.change:
        return
    if record.change.placing != record.change.number:
        yield Violation("places", "", f"runs are placed by {record.change.placing}, not by {record.change.number}")
    elif not record.change.fresh:
        yield Violation("places", "", "no worker places runs by the new number")
    for run in record.change.fresh:
        if record.placed.get(run, []) != [place(run, record.change.number)]:
            yield Violation("places", run, f"began after the change, and is in {record.placed.get(run)}")

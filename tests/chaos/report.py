"""The result of a chaos, as tables for people."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table

from tests.chaos.judging.remains import STUCK
from tests.chaos.record import Record, Violation

MOST_SHOWN = 40


def tables(rounds: Sequence[tuple[Record, list[Violation]]], seed: str, seconds: float) -> Group:
    """Faults by kind, runs by outcome, losses, and every violation with its run and its seed."""
    return Group(_faults(rounds, seconds), _outcomes(rounds), _sums(rounds, seed), _violations(rounds))


def repeated_executions(record: Record) -> int:
    """Executions of tool calls beyond the first of each."""
    return len(record.executions) - len({line.key for line in record.executions})


def show(rounds: Sequence[tuple[Record, list[Violation]]], seed: str, seconds: float) -> None:
    """Print the tables."""
    Console(width=None if os.isatty(1) else 120).print(tables(rounds, seed, seconds))


def _faults(rounds: Sequence[tuple[Record, list[Violation]]], seconds: float) -> Table:
    table = Table(title=f"faults in {seconds:.0f} s, {len(rounds)} rounds", title_justify="left")
    table.add_column("fault")
    table.add_column("times", justify="right")
    total = sum((Counter(record.faults) for record, _ in rounds), Counter[str]())
    for fault, times in sorted(total.items()):
        table.add_row(fault, str(times))
    table.add_section()
    table.add_row("kill -9 of workers", str(sum(n for fault, n in total.items() if fault.startswith("kill -9 of"))))
    restarts = sum(n for fault, n in total.items() if fault.startswith(("kill -9 and restart", "fail-over")))
    table.add_row("restarts and fail-overs of the server", str(restarts))
    return table


def _outcomes(rounds: Sequence[tuple[Record, list[Violation]]]) -> Table:
    table = Table(title="runs by planned fault, and how they ended", title_justify="left")
    ends = ("completed", "incomplete", "failed", "cancelled", "no end")
    for column in ("plan", "on_failure", *ends):
        table.add_column(column, justify="right" if column in ends else "left")
    counts: Counter[tuple[str, str, str]] = Counter()
    for record, _ in rounds:
        for story in record.stories:
            log = record.logs[story.run]
            end = log[-1].event["type"] if log else ""
            counts[story.fate, story.on_failure, end if end in ends else "no end"] += 1
    for fate, policy in sorted({(f, p) for f, p, _ in counts}):
        table.add_row(fate, policy, *(str(counts[fate, policy, end] or "") for end in ends))
    return table


def _sums(rounds: Sequence[tuple[Record, list[Violation]]], seed: str) -> Table:
    table = Table(title=f"seed {seed}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    records = [record for record, _ in rounds]
    logs = [log for record in records for log in record.logs.values()]
    table.add_row("runs", str(len(logs)))
    table.add_row("of them under policies", str(sum(bool(s.guarded) for record in records for s in record.stories)))
    table.add_row("decisions of policies", str(sum(len(p) for record in records for p in record.topics["decisions"])))
    table.add_row("events in logs", str(sum(map(len, logs))))
    said = [each for record in records for talk in record.talks for each in talk.sent]
    table.add_row("appends to sessions", str(sum(map(len, said))))
    again = sum(entry.event["type"] in ("retrying", "restarted") for log in logs for entry in log)
    table.add_row("repeated attempts", str(again))
    table.add_row("tool executions", str(sum(len(record.executions) for record in records)))
    table.add_row("of them beyond one per call", str(sum(map(repeated_executions, records))))
    table.add_row("workers", str(sum(len(record.exits) for record in records)))
    exits = [end for record in records for end in record.exits if end.status == STUCK]
    table.add_row("of them exited after a fault in a task", str(sum(end.task_fault_s is not None for end in exits)))
    table.add_row("of them exited as a task could not continue", str(sum(end.task_fault_s is None for end in exits)))
    visits = Counter(f"{v.kind}: {v.outcome}" for record in records for v in record.visits)
    for what, times in sorted(visits.items()):
        table.add_row(f"client of a gateway, {what}", str(times))
    changes = [record.change for record in records if record.change]
    table.add_row("changes of the number of partitions", str(len(changes)))
    table.add_section()
    table.add_row("violations: lost, doubled, out of order, left over", str(sum(len(found) for _, found in rounds)))
    return table


def _violations(rounds: Sequence[tuple[Record, list[Violation]]]) -> Table | str:
    if not any(found for _, found in rounds):
        return "nothing was lost"
    table = Table(title="violations", title_justify="left")
    for column in ("seed", "rule", "run", "what"):
        table.add_column(column, overflow="fold")
    for record, found in rounds:
        for violation in found[:MOST_SHOWN]:
            table.add_row(record.seed, violation.rule, violation.run, violation.what[:600])
        if len(found) > MOST_SHOWN:
            table.add_row(record.seed, "…", "", f"{len(found) - MOST_SHOWN} more")
    return table

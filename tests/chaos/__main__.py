"""`python -m tests.chaos [--seconds N] [--seed S] [--broken BUILD] [--server KIND] [--keep DIRECTORY]`.

Exit code 1 on a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvloop

from tests.chaos import report
from tests.chaos.broken import BUILDS
from tests.chaos.faults import ALL, Fault, Rates
from tests.chaos.judging import judge
from tests.chaos.record import Record, Violation
from tests.chaos.round import Plan, play
from tests.chaos.servers import KINDS, Kind, NoDisk

ROUND_S = 60.0
"""Of chaos, before all is mended, stopped and judged, and the next deployment begins."""
ROTATION: tuple[Kind, ...] = ("single", "cluster", "disk", "single", "sentinel")
"""The servers of the rounds, in turn."""
_THROUGHOUT = ("clocks", "hostile")
"""Faults that are there all the time, or not at all."""
HARMFUL = 1 / 3
"""The share of the runs with a policy that harms its process at random."""
END_S = 12.0
"""What the end of a round takes, about."""


def main() -> None:
    """Play rounds for so long, and print what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break everything, and judge what came.")
    parser.add_argument("--seconds", type=float, default=600.0, help="all in all, about (600)")
    parser.add_argument("--seed", default="", help="what an earlier chaos printed; SEED.ROUND: that round alone")
    parser.add_argument("--broken", choices=[*BUILDS], help="a build that must be caught")
    parser.add_argument("--server", choices=[*KINDS], help="of every round; by default they take turns")
    parser.add_argument("--faults", help="only these, by name, with commas between them")
    parser.add_argument("--keep", type=Path, help="keep the rounds with violations here: record.json and logs")
    options = parser.parse_args()
    seed, _, only = (options.seed or str(random.randrange(10**6))).partition(".")
    print(f"seed {seed}", flush=True)
    plain = _plan(options.faults) if options.faults else Plan(seed="", seconds=0, harmful=HARMFUL)
    began = time.monotonic()
    rounds: list[tuple[Record, list[Violation]]] = []
    try:
        for number, seconds in _rounds(options.seconds, int(only) if only else None):
            server = options.server or ROTATION[number % len(ROTATION)]
            plan = msgspec.structs.replace(
                plain, seed=f"{seed}.{number}", seconds=seconds, build=options.broken, server=server
            )
            try:
                record, found = _round(plan, options.keep)
            except NoDisk as e:
                print(f"round {plan.seed}: skipped, for no disk can be mounted here: {e}", flush=True)
                continue
            rounds.append((record, found))
            told = f"{server}, {len(record.stories)} runs, {report.beyond_one(record)} tools run again"
            print(f"round {plan.seed}: {told}, {len(found)} violations", flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
    report.show(rounds, seed, time.monotonic() - began)
    sys.exit(any(found for _, found in rounds))


def _plan(names: str) -> Plan:
    """Of these faults alone. Ends the program where one is unknown."""
    asked = {name.strip() for name in names.split(",")}
    if unknown := asked - {*ALL, *_THROUGHOUT}:
        sys.exit(f"no such fault: {', '.join(unknown)}; there are {', '.join((*ALL, *_THROUGHOUT))}")
    weights: dict[Fault, int] = {fault: weight for fault, weight in ALL.items() if fault in asked}
    plan = Plan(seed="", seconds=0, harmful=HARMFUL, rates=Rates(weights=weights), clocks="clocks" in asked)
    return plan if "hostile" in asked else msgspec.structs.replace(plan, hostile=0.0)


def _rounds(seconds: float, only: int | None) -> Iterator[tuple[int, float]]:
    """The number of each round and its seconds of chaos, until the time is over; at least one."""
    until = time.monotonic() + seconds
    for number in itertools.count() if only is None else [only]:
        left = until - time.monotonic() - END_S
        if number and only is None and left < END_S:
            return
        yield number, min(ROUND_S, max(left, 5.0))


def _round(plan: Plan, keep: Path | None) -> tuple[Record, list[Violation]]:
    with tempfile.TemporaryDirectory(prefix="tokenbus-chaos-") as temporary:
        directory = Path(temporary)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            record = runner.run(play(plan, directory))
        try:
            found = judge(record)
        except Exception:  # of a log that no rule expects; what it was is wanted all the more
            _keep(keep, plan, directory, record)
            raise
        if found:
            _keep(keep, plan, directory, record)
    return record, found


def _keep(keep: Path | None, plan: Plan, directory: Path, record: Record) -> None:
    if keep:
        kept = keep / plan.seed
        shutil.copytree(directory / "logs", kept / "logs", dirs_exist_ok=True)
        (kept / "record.json").write_bytes(msgspec.json.encode(record))


if __name__ == "__main__":
    main()

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
from tests.chaos.deployment.servers import KINDS, Kind, NoDisk
from tests.chaos.faults import ALL, THEMES, Fault, Rates
from tests.chaos.judging import judge
from tests.chaos.judging.pressure import stood
from tests.chaos.record import Record, Violation
from tests.chaos.round import Plan, play

ROUND_S = 60.0
"""Seconds of chaos in a round. Then all faults are repaired, the round is stopped and judged, and the next deployment
starts.
"""
ROTATION: tuple[Kind, ...] = ("single", "cluster", "disk", "single", "sentinel")
"""The servers of the rounds, in rotation."""
THEME_ROTATION = (None, None, 0, None, None, 1, None)
"""Rounds with all faults (None), and those with the faults of one of `THEMES` alone."""
FLEET_NAMES = ("separate", "chained", "both")
"""Names in `tests.chaos.deployment.workers.FLEETS`."""
CLIENTS = 6
"""Concurrent clients of the gateways, in rounds that have clients."""
THROUGHOUT = ("clocks", "hostile")
"""Faults that last for the whole round, or do not occur."""
HARMFUL = 1 / 3
"""Share of the runs whose policy harms its process at random."""
END_S = 12.0
"""Approximate duration of the end of a round."""


def main() -> None:
    """Play rounds until the time is over, and print the results."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Inject faults into everything, and judge the output."
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="total time, approximately (600)")
    parser.add_argument(
        "--seed", default="", help="the seed that an earlier chaos printed; SEED.ROUND plays that round alone"
    )
    parser.add_argument("--broken", choices=[*BUILDS], help="a broken build that the judge must catch")
    parser.add_argument("--server", choices=[*KINDS], help="server of every round (default: in rotation)")
    parser.add_argument("--faults", help="comma-separated names of the faults to inject (default: all)")
    parser.add_argument("--fleet", choices=FLEET_NAMES, help="fleet of every round (default: random)")
    parser.add_argument("--round", type=float, default=ROUND_S, help="seconds of chaos in each round (60)")
    parser.add_argument(
        "--clients", type=float, default=0.5, help="share of the rounds with clients of the gateways (0.5)"
    )
    parser.add_argument(
        "--changes", type=float, default=1 / 3, help="share of the rounds that change the number of partitions (1/3)"
    )
    parser.add_argument(
        "--keep", type=Path, help="directory for record.json and the logs of each round with violations"
    )
    options = parser.parse_args()
    seed, _, only = (options.seed or str(random.randrange(10**6))).partition(".")
    print(f"seed {seed}", flush=True)
    plain = _plan(options.faults) if options.faults else Plan(seed="", seconds=0, harmful=HARMFUL)
    began = time.monotonic()
    rounds: list[tuple[Record, list[Violation]]] = []
    try:
        for number, seconds in _rounds(options.seconds, int(only) if only else None, options.round):
            server = options.server or ROTATION[number % len(ROTATION)]
            theme = None if options.faults else THEME_ROTATION[number % len(THEME_ROTATION)]
            rates = plain.rates if theme is None else msgspec.structs.replace(plain.rates, weights=THEMES[theme])
            plan = msgspec.structs.replace(
                plain,
                seed=f"{seed}.{number}",
                rates=rates,
                seconds=seconds,
                build=options.broken,
                server=server,
                fleet=FLEET_NAMES.index(options.fleet) if options.fleet else None,
                clients=CLIENTS if _has(options.clients, number, 0) else 0,
                changes=_has(options.changes, number, 1),
            )
            try:
                record, found = _round(plan, options.keep)
            except NoDisk as e:
                print(f"round {plan.seed}: skipped, because no disk can be mounted here: {e}", flush=True)
                continue
            rounds.append((record, found))
            summary = f"{server}, {len(record.stories)} runs, {report.repeated_executions(record)} repeated executions"
            summary += f", {len(record.visits)} clients of gateways" if record.visits else ""
            summary += f", its provider stood for {record.provider_stood_s:.1f} s" if stood(record) else ""
            summary += f", {record.partitions} to {record.change.number} partitions" if record.change else ""
            print(f"round {plan.seed}: {summary}, {len(found)} violations", flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
    report.show(rounds, seed, time.monotonic() - began)
    sys.exit(any(found for _, found in rounds))


def _has(share: float, number: int, shift: int) -> bool:
    """Whether the round with this number belongs to this share of all rounds. ``shift``: so that two shares may overlap
    or not.
    """
    return int((number + shift + 1) * share) > int((number + shift) * share)


def _plan(names: str) -> Plan:
    """Plan a round with these faults alone. Ends the program if one is unknown."""
    selected = {name.strip() for name in names.split(",")}
    if unknown := selected - {*ALL, *THROUGHOUT}:
        sys.exit(f"no such fault: {', '.join(unknown)}; the known faults are {', '.join((*ALL, *THROUGHOUT))}")
    weights: dict[Fault, int] = {fault: weight for fault, weight in ALL.items() if fault in selected}
    plan = Plan(seed="", seconds=0, harmful=HARMFUL, rates=Rates(weights=weights), clocks="clocks" in selected)
    return plan if "hostile" in selected else msgspec.structs.replace(plan, hostile=0.0)


def _rounds(seconds: float, only: int | None, longest: float) -> Iterator[tuple[int, float]]:
    """Yield the number of each round and its seconds of chaos, until the time is over; at least one round."""
    until = time.monotonic() + seconds
    for number in itertools.count() if only is None else [only]:
        left = until - time.monotonic() - END_S
        if number and only is None and left < END_S:
            return
        yield number, min(longest, max(left, 5.0))


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

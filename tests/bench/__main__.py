"""`python -m tests.bench [--only NAME …] [--json | --readme]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Never

from tests.bench import readme
from tests.bench.figures import NAMES, SECTIONS, WARM, Figure, decoded, measured, walked
from tests.bench.measure import Meter
from tests.bench.report import Report, as_json, as_table, machine
from tests.bench.sections.beside import beside
from tests.bench.sections.cancel import cancelled
from tests.bench.sections.chained import chained
from tests.bench.sections.console import watched
from tests.bench.sections.disconnect import left
from tests.bench.sections.gateway import measured_gateway
from tests.bench.sections.hands import measured_hands
from tests.bench.sections.intake import intake_costs, taken_in
from tests.bench.sections.latency_budget import budgeted
from tests.bench.sections.open_runs import opened
from tests.bench.sections.otel import traced
from tests.bench.sections.policy import judged
from tests.bench.sections.scaling import remembered, scaled
from tests.bench.sections.scripts import longest_scripts
from tests.bench.sections.sessions import measured_sessions
from tests.bench.sections.steps import longest_steps
from tests.bench.sections.waiting import waited
from tests.bench.stack import running

ALONE: dict[str, Callable[[], list[Figure]]] = {
    "decode": decoded,
    "path": walked,
    "cancel": cancelled,
    "intake": taken_in,
    "intake-cpu": intake_costs,
    "beside": beside,
    "scripts": longest_scripts,
    "steps": longest_steps,
    "scaling": scaled,
    "memory": remembered,
    "open-runs": opened,
    "policy": judged,
    "chained": chained,
    "latency-budget": budgeted,
    "gateway": measured_gateway,
    "disconnect": left,
    "console": watched,
    "otel": traced,
    "hands": measured_hands,
    "sessions": measured_sessions,
    "waiting": waited,
}
"""Sections that start their own processes, or need none."""
ALL = (*NAMES, *ALONE)


def main() -> None:
    """Run the requested sections, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure the cost of a chunk.")
    parser.add_argument("--only", action="append", choices=ALL, help="measure only this section; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--readme", action="store_true", help="measure what the README shows, and write it there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    # With the bytecode cache off, every process compiles its sources at its start, which no deployment does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        report = bench(options.only or (readme.SHOWN if options.readme else ALL))
    except KeyboardInterrupt:
        sys.exit(130)
    print(as_json(report) if options.json else as_table(report))
    if options.readme:
        readme.write(report)


def bench(names: Collection[str]) -> Report:
    """Measure these sections. Everything that was started is stopped, even after an error."""
    load_before, begin = os.getloadavg()[0], time.monotonic()
    figures: list[Figure] = []
    server = "no server"
    chosen = [name for name in names if name not in ALONE]
    if chosen:
        _say("starting the services")
        loads = [WARM, *(SECTIONS[name].load for name in chosen if name in SECTIONS)]
        with running(loads) as stack:
            server = stack.server
            meter = Meter(stack)
            meter.services(WARM)
            meter.bare(WARM)
            for name in chosen:
                _say(name)
                figures += measured(meter, name)
    for name in names:
        if name in ALONE:
            _say(name)
            figures += ALONE[name]()
    return Report(machine(server, load_before), time.monotonic() - begin, figures)


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


def _stop(number: int, frame: object) -> Never:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

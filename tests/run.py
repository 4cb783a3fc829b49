"""Runs the suite in parts, each a pytest process that collects only its own files.

Files whose tests compute and files whose tests wait for processes have a pool each, side by side: the first has a
process for each core, below the others in priority; the second has more processes than there are cores. Parts are
formed from the seconds in tests/seconds.json, the longest first. That file is also the budget: the end of a run names
the files that took much more.

A test that fails beside others has a second try alone, and is named. Most tests run real processes, several at once;
on a loaded machine one of thousands can miss a bound that says nothing of the code. More failures than that are never
tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MOST = 12
"""More failures than this are no accident."""
SECONDS = Path("tests/seconds.json")
"""The seconds that each file takes, on two cores without other load."""
COMPUTE = ("tests/unit/", "tests/fuzz/", "tests/services/gateway/surfaces/", "tests/services/settings/")
"""The rooms whose tests wait for nothing."""
UNKNOWN_S = 5.0
"""What a file without an entry is taken to need."""
OVER = 2.0
"""How many times its seconds a file may take before it is named."""
SHORTEST_S = 5.0
"""Files that take less are never named."""
PARTS = 3
"""So many parts for each process at once: fewer leave processes idle at the end, more start more interpreters."""

ON_BOTH_SERVERS = (
    "tests/contract/bus",
    "tests/contract/test_leaks.py",
    "tests/contract/client/test_cluster.py",
)
"""What differs between server versions: scripts, commands, connections. The client above them sends nothing else."""
CHAINED = (
    "tests/e2e/runs/test_formats.py",
    "tests/e2e/runs/test_cancel.py",
    "tests/e2e/runs/test_poison.py",
    "tests/e2e/providers/test_continue.py",
    "tests/e2e/providers/test_failures.py",
    "tests/e2e/operating/test_records.py",
)
"""Runs also taken through one process for fetcher, normalizer and parser."""

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Part:
    """Files for one pytest process, its environment, and the seconds that they are expected to take."""

    files: tuple[str, ...]
    seconds: float
    environment: Environment = ()


@dataclass
class Results:
    """What ended so far: by file the seconds, by test the seconds, and what failed, each with its environment."""

    files: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    tests: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    outcomes: Counter[str] = field(default_factory=Counter[str])
    failed: list[tuple[Environment, str]] = field(default_factory=list[tuple[Environment, str]])
    broken: list[str] = field(default_factory=list[str])
    """Output of parts that ended otherwise than by failed tests."""


# As a plugin of each part: writes what its tests took.

_took: dict[str, float] = {}
_ended: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[report.nodeid] = _took.get(report.nodeid, 0.0) + report.duration
    if report.failed or (report.when == "call" and report.nodeid not in _ended) or report.skipped:
        _ended[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    if path := os.environ.get("TESTS_RESULTS"):
        Path(path).write_text(json.dumps({"took": _took, "ended": _ended}))


def plan(files: Iterable[str], seconds: dict[str, float], count: int, environment: Environment = ()) -> list[Part]:
    """About `count` parts of near-equal length, the longest first. A file is never divided."""
    rows = sorted(((seconds.get(file, UNKNOWN_S), file) for file in files), reverse=True)
    bins: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(min(count, len(rows)))]
    for took, file in rows:
        at = min(range(len(bins)), key=lambda i: bins[i][0])
        bins[at] = (bins[at][0] + took, [*bins[at][1], file])
    return sorted((Part(tuple(names), took, environment) for took, names in bins), key=lambda part: -part.seconds)


def files_in(paths: Sequence[str]) -> list[str]:
    found: set[str] = set()
    for path in map(Path, paths):
        found |= {str(path)} if path.is_file() else {str(file) for file in path.rglob("test_*.py")}
    return sorted(found)


def over_budget(took: dict[str, float], seconds: dict[str, float]) -> list[str]:
    """A line for each file that took far more than its seconds, the worst first, and for each that has none."""
    lines: list[tuple[float, str]] = []
    for file, now in took.items():
        if now < SHORTEST_S:
            continue
        if file not in seconds:
            lines.append((now, f"{now:7.1f} s, no budget yet: {file}"))
        elif now > OVER * max(seconds[file], SHORTEST_S / OVER):
            lines.append((now, f"{now:7.1f} s of {seconds[file]:.1f} s: {file}"))
    return [line for _, line in sorted(lines, reverse=True)]


def run_part(part: Part, options: Sequence[str], results: Results, lock: threading.Lock, *, polite: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "results.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.run",
            "-p",
            "no:cacheprovider",
            *options,
            *part.files,
        ]
        began = time.monotonic()
        with subprocess.Popen(
            ["nice", "-n", "5", *command] if polite else command,
            env={**os.environ, **dict(part.environment), "TESTS_RESULTS": str(report)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout
            output: list[str] = []
            for line in process.stdout:
                output.append(line)
                if " failed in its " in line:  # at once, if the run is cut off later
                    print(line, end="", flush=True)
        found = json.loads(report.read_text()) if report.exists() else {"took": {}, "ended": {}}
    with lock:
        for name, took in found["took"].items():
            results.tests[name] += took
            if not part.environment:  # the budget is of the first environment
                results.files[name.split("::")[0]] += took
        results.outcomes.update(found["ended"].values())
        failed = [name for name, outcome in found["ended"].items() if outcome == "failed"]
        results.failed += [(part.environment, name) for name in failed]
        # 0: passed; 1: some failed, known by name; 5: all were deselected.
        if process.returncode not in (0, 1, 5) or (process.returncode == 1 and not failed):
            results.broken.append("".join(output))
        said = " ".join(f"{name}={value}" for name, value in part.environment)
        print(
            f"{time.monotonic() - began:6.0f} s: {len(part.files)} files {said} {output[-1].strip() if output else ''}",
            flush=True,
        )
        if process.returncode not in (0, 5):
            print("".join(output), flush=True)


def run_pool(parts: list[Part], slots: int, work: Callable[[Part], None]) -> list[threading.Thread]:
    """Threads that take the parts, the longest first."""
    waiting = iter(sorted(parts, key=lambda part: -part.seconds))
    lock = threading.Lock()

    def take() -> None:
        while True:
            with lock:
                part = next(waiting, None)
            if part is None:
                return
            work(part)

    threads = [threading.Thread(target=take) for _ in range(slots)]
    for thread in threads:
        thread.start()
    return threads


def second_try(results: Results, options: Sequence[str]) -> bool:
    """Whether each test that failed passes alone."""
    names = ", ".join(name for _, name in results.failed)
    print(f"\nSecond try, alone: {names}", flush=True)
    passed = True
    for environment in dict.fromkeys(environment for environment, _ in results.failed):
        failed = sorted(name for of, name in results.failed if of == environment)
        command = [*PYTEST, *options, *failed]
        passed &= not subprocess.run(command, env={**os.environ, **dict(environment)}, check=False).returncode
    if passed:
        print(f"\nFailed beside others and passed alone: {names}")
    return passed


def main(arguments: Sequence[str]) -> int:
    """Run these paths, or the whole suite; return 0 if all pass, some of them perhaps alone."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.run",
        usage="%(prog)s [options] [files and folders] [options of pytest]",
        description=__doc__,
    )
    parser.add_argument("-n", type=int, default=4, metavar="N", help="processes at once, of those whose tests wait")
    parser.add_argument("--everything", action="store_true", help="also a second server version, and chained workers")
    parser.add_argument("--keep-seconds", action="store_true", help=f"write what each file took to {SECONDS}")
    chosen, others = parser.parse_known_args(arguments)
    paths = [word for word in others if Path(word).exists()]
    options = [word for word in others if word not in paths]
    # Some machines switch the bytecode cache off. A suite that starts hundreds of interpreters would compile all of its
    # sources in each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    files = files_in(paths or ["tests"])
    computing = [file for file in files if file.startswith(COMPUTE)]
    cores = os.cpu_count() or 1
    waiting = plan([file for file in files if not file.startswith(COMPUTE)], seconds, PARTS * chosen.n)
    if chosen.everything:
        waiting += plan(files_in(CHAINED), seconds, 2, (("TESTS_CHAINED", "1"),))
        if server := shutil.which("redis-server"):
            waiting += plan(files_in(ON_BOTH_SERVERS), seconds, chosen.n, (("TOKENBUS_TEST_SERVER", server),))
        else:
            print("no redis-server here: the contract tests run on one server version only")
    results, lock = Results(), threading.Lock()
    threads = run_pool(waiting, chosen.n, lambda part: run_part(part, options, results, lock, polite=False))
    parts = plan(computing, seconds, PARTS * cores)
    threads += run_pool(parts, cores, lambda part: run_part(part, options, results, lock, polite=True))
    for thread in threads:
        thread.join()
    print(f"\n{sum(results.outcomes.values())} tests in {time.monotonic() - began:.0f} s: {dict(results.outcomes)}")
    print("The slowest tests:")
    for name, took in sorted(results.tests.items(), key=lambda row: -row[1])[:25]:
        print(f"{took:7.1f} s: {name}")
    if lines := over_budget(results.files, seconds):
        print(f"Files that took much longer than {SECONDS} says:", *lines, sep="\n")
    if chosen.keep_seconds:
        kept = {file: round(results.files[file], 1) for file in results.files}
        rows = {
            file: kept.get(file, seconds.get(file, UNKNOWN_S))
            for file in sorted({*seconds, *kept})
            if Path(file).exists()
        }
        SECONDS.write_text(json.dumps(rows, indent=1) + "\n")
    if results.broken:
        print(f"{len(results.broken)} parts ended otherwise than by a failed test")
        return 1
    if results.failed and len(results.failed) <= MOST:
        return 0 if second_try(results, options) else 1
    return 1 if results.failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

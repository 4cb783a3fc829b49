"""Runs the suite: one pytest session for each environment, each in processes that are forked after its collection.

Files whose tests compute and files whose tests wait have workers of their own, side by side (`tests.pool`):
for the first as many as there are cores, below the others in priority; for the second as many as together keep the
cores busy by what tests/seconds.json says of them. Files are taken in the order of their seconds there, the longest
first. It is also the budget: the end of a run names the files whose tests took much more of the processors, whatever
else the machine did.

A test that fails beside others has a second try alone, and is named. Most tests run real processes, several at once;
on a loaded machine one of thousands can miss a bound that says nothing of the code. More failures than that are never
tried again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests import fork_server
from tests.pool import Cost, Results, Settings

MOST = 12
"""More failures than this are no accident."""
SECONDS = Path("tests/seconds.json")
"""What each file takes on two cores: its seconds without other load, which order the files, and its CPU seconds."""
COMPUTE = ("tests/unit/", "tests/fuzz/", "tests/services/gateway/surfaces/", "tests/services/settings/")
"""The rooms whose tests wait for nothing."""
A_CORE = 10
"""Tokens of a core: a file that takes half of one while it runs weighs 5."""
BUSY = 0.8
"""The share of the cores that files may take together. What a file takes at its worst comes on top."""
OVER = 1.5
"""How many times its CPU seconds a file may take before it is named."""
SHORTEST_S = 4.0
"""Files that take less are never named."""

ON_BOTH_SERVERS = (
    *(f"tests/contract/bus/{room}" for room in ("leases", "outages", "scripts", "server", "work_queue")),
    "tests/contract/bus/stage/test_stage.py",
    "tests/contract/bus/test_cluster.py",
    "tests/contract/test_leaks.py",
    "tests/contract/client/test_cluster.py",
)
"""What differs between server versions: scripts, commands, connections. Stages and clients above send nothing else."""
SLOW = (
    "tests/chaos/test_short.py",
    "tests/soak/test_soak.py",
    *(f"tests/e2e/operating/test_{name}.py" for name in ("demo", "upgrade", "repartition", "repartition_cluster")),
    "tests/e2e/gateway/test_crowd.py",
    "tests/deploy/test_planted_faults.py",
)
"""Whole deployments for half a minute or more: run with --everything, as CI does, or by name."""
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


@dataclass
class Found:
    """What ended so far, of all environments."""

    files: dict[str, Cost] = field(default_factory=dict[str, Cost])
    """Of the first environment, whose costs are the budget."""
    cpu: float = 0.0
    tests: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    outcomes: Counter[str] = field(default_factory=Counter[str])
    failed: list[tuple[Environment, str]] = field(default_factory=list[tuple[Environment, str]])
    broken: int = 0
    """Sessions that ended otherwise than by failed tests."""


def files_in(paths: Sequence[str]) -> list[str]:
    found: set[str] = set()
    for path in map(Path, paths):
        found |= {str(path)} if path.is_file() else {str(file) for file in path.rglob("test_*.py")}
    return sorted(found)


def over_budget(took: dict[str, Cost], budget: dict[str, Cost]) -> list[str]:
    """A line for each file that took far more CPU than its budget, the worst first, and for each that has none."""
    lines: list[tuple[float, str]] = []
    for file, now in took.items():
        if now.cpu < SHORTEST_S:
            continue
        if file not in budget:
            lines.append((now.cpu, f"{now.cpu:7.1f} s, no budget yet: {file}"))
        elif now.cpu > OVER * max(budget[file].cpu, SHORTEST_S / OVER):
            lines.append((now.cpu, f"{now.cpu:7.1f} s of {budget[file].cpu:.1f} s: {file}"))
    return [line for _, line in sorted(lines, reverse=True)]


def by_room(files: dict[str, Cost]) -> list[str]:
    """A line for each room and each larger part of one: its CPU seconds, files, and seconds."""
    rooms: defaultdict[str, list[Cost]] = defaultdict(list)
    for file, cost in files.items():
        for room in {"/".join(file.split("/")[:2]), "/".join(file.split("/")[:3])}:
            rooms[room].append(cost)
    lines = [
        (sum(cost.cpu for cost in costs), f"{len(costs):4} files, {sum(cost.seconds for cost in costs):5.0f} s: {room}")
        for room, costs in rooms.items()
    ]
    return [f"{cpu:7.1f} s {line}" for cpu, line in sorted(lines, reverse=True) if cpu >= SHORTEST_S]


def run_session(
    environment: Environment, files: Sequence[str], options: Sequence[str], settings: Settings, found: Found
) -> None:
    """Run a session to its end, and keep what it found."""
    with tempfile.TemporaryDirectory() as directory:
        settings = msgspec.structs.replace(settings, results=f"{directory}/results.json")
        command = [*PYTEST, "-q", "-p", "tests.pool", *options, *files]
        with subprocess.Popen(
            command,
            env={**os.environ, **dict(environment), "TESTS_POOL": msgspec.json.encode(settings).decode()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(*settings.tokens, *settings.turn),
        ) as process:
            assert process.stdout
            output: list[str] = []
            for line in process.stdout:
                output.append(line)
                if " failed in its " in line:  # at once, if the run is cut off later
                    print(line, end="", flush=True)
        written = Path(settings.results)
        ended = msgspec.json.decode(written.read_bytes(), type=Results) if written.exists() else Results()
    found.cpu += sum(cost.cpu for cost in ended.files.values())
    if not environment:
        found.files |= ended.files
    for name, took in ended.took.items():
        found.tests[name] += took
    found.outcomes.update(ended.ended.values())
    failed = [name for name, outcome in ended.ended.items() if outcome == "failed"]
    found.failed += [(environment, name) for name in failed]
    # 0: passed; 1: some failed, known by name; 5: all were deselected.
    found.broken += process.returncode not in (0, 1, 5) or (process.returncode == 1 and not failed)
    said = " ".join(f"{name}={value}" for name, value in environment)
    print(f"{len(files)} files {said} {output[-1].strip() if output else ''}", flush=True)
    if process.returncode not in (0, 5):
        print("".join(output), flush=True)


def _filled_pipe(count: int) -> tuple[int, int]:
    read, write = os.pipe()
    os.write(write, b"." * count)
    return read, write


def _weight(cost: Cost, most: int) -> int:
    return min(max(1, round(A_CORE * cost.cpu / max(cost.seconds, 0.1))), most)


def second_try(found: Found, options: Sequence[str]) -> bool:
    """Whether each test that failed passes alone."""
    names = ", ".join(name for _, name in found.failed)
    print(f"\nSecond try, alone: {names}", flush=True)
    passed = True
    for environment in dict.fromkeys(environment for environment, _ in found.failed):
        failed = sorted(name for of, name in found.failed if of == environment)
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
    parser.add_argument("-n", type=int, default=8, metavar="N", help="files at once at most, of those whose tests wait")
    parser.add_argument(
        "--everything", action="store_true", help="also the slow files, a second server, chained workers"
    )
    parser.add_argument("--keep-seconds", action="store_true", help=f"write what each file took to {SECONDS}")
    chosen, others = parser.parse_known_args(arguments)
    paths = [word for word in others if Path(word).exists()]
    options = [word for word in others if word not in paths]
    # Some machines switch the bytecode cache off. A suite that starts hundreds of interpreters would compile all of its
    # sources in each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    budget = msgspec.json.decode(SECONDS.read_bytes(), type=dict[str, Cost])
    files = files_in(paths or ["tests"])
    if not paths and not chosen.everything:
        files = sorted({*files} - {*SLOW})
    sessions: dict[Environment, list[str]] = {(): files}
    if chosen.everything:
        sessions[("TESTS_CHAINED", "1"),] = files_in(CHAINED)
        if server := shutil.which("redis-server"):
            sessions[("TOKENBUS_TEST_SERVER", server),] = files_in(ON_BOTH_SERVERS)
        else:
            print("no redis-server here: the contract tests run on one server version only")
    cores = os.cpu_count() or 1
    most = max(1, round(cores * A_CORE * BUSY))
    settings = Settings(
        results="",
        waiting=chosen.n,
        computing=cores,
        tokens=_filled_pipe(most),
        turn=_filled_pipe(1),
        weights={file: _weight(cost, most) for file, cost in budget.items()},
        compute=COMPUTE,
        seconds={file: cost.seconds for file, cost in budget.items()},
    )
    found = Found()
    threads = [
        threading.Thread(target=run_session, args=(environment, files, options, settings, found))
        for environment, files in sessions.items()
    ]
    with fork_server.template() as os.environ["TESTS_FORK_SERVER"]:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    del os.environ["TESTS_FORK_SERVER"]
    print(f"\n{sum(found.outcomes.values())} tests in {time.monotonic() - began:.0f} s, ", end="")
    print(f"{found.cpu:.0f} CPU seconds: {dict(found.outcomes)}")
    print("CPU seconds by room:", *by_room(found.files), "The slowest tests:", sep="\n")
    for name, took in sorted(found.tests.items(), key=lambda row: -row[1])[:25]:
        print(f"{took:7.1f} s: {name}")
    if lines := over_budget(found.files, budget):
        print(f"Files that took much more of the processors than {SECONDS} says:", *lines, sep="\n")
    if chosen.keep_seconds:
        kept = {file: cost for file, cost in sorted({**budget, **found.files}.items()) if Path(file).exists()}
        rows = [f'  "{file}": [{cost.seconds:.1f}, {cost.cpu:.1f}]' for file, cost in kept.items()]
        SECONDS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    if found.broken:
        print(f"{found.broken} sessions ended otherwise than by a failed test")
        return 1
    if found.failed and len(found.failed) <= MOST:
        return 0 if second_try(found, options) else 1
    return 1 if found.failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

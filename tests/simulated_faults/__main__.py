"""`python -m tests.simulated_faults`: plays seeds one after the other. The exit code is 1 if one of them went wrong."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec

from tests.servers import binary
from tests.simulated_faults.guards import guards, keep_trial, write_table
from tests.simulated_faults.play import Fleet, Plan, Played, keep, play
from tests.simulated_faults.virtual import VirtualServer, clock_library

_NO_RANDOM_ADDRESSES = 0x0040000
"""<sys/personality.h>"""

_MEMORY = "/dev/shm"
"""Where the server's file is: each command waits until it is on the disk, and a disk takes a thousand times longer."""


def main() -> int:
    """Play what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (1)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin none after so much time of a processor (no limit)"
    )
    parser.add_argument("--fleet", choices=get_args(Fleet), default="any")
    parser.add_argument("--faults", default="", help="comma-separated names of the faults to inject (all)")
    parser.add_argument("--numbers", help="comma-separated numbers of the faults to inject (all)")
    parser.add_argument(
        "--shrink", action=argparse.BooleanOptionalAction, default=True, help="look for the fewest faults of a bad seed"
    )
    parser.add_argument("--keep", metavar="WHY", help="add a bad seed, shrunk, to those that the tests play")
    parser.add_argument(
        "--guards",
        metavar="FILE",
        help="play the seeds without each guard of the scripts of such a name, until one goes wrong; write the table",
    )
    parser.add_argument("--show", action="store_true", help="print the workers' logs")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set is part of a play: by hashes, or by addresses
        ctypes.CDLL(None).personality(_NO_RANDOM_ADDRESSES)
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulated_faults", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    faults = tuple(filter(None, args.faults.split(",")))
    numbers = [int(number) for number in filter(None, args.numbers.split(","))] if args.numbers else None
    ends, bad, faults_met, messages, seconds = Counter[str](), list[int](), 0, 0, 0.0
    seed, took = args.seed, 0.0
    with tempfile.TemporaryDirectory() as name:
        clocks = clock_library(Path(name))
        if args.guards is not None:
            return _try_guards(args.guards, range(args.seed, args.seed + args.seeds), clocks, args.seconds)
        for seed in range(args.seed, args.seed + args.seeds):
            plan = Plan(seed=seed, fleet=args.fleet, faults=faults, numbers=numbers, show=args.show)
            played = _apart(plan, clocks)
            faults_met, messages = faults_met + len(played.faults), messages + played.messages
            seconds += played.seconds
            ends.update(played.ends)
            if played.problems:
                bad.append(seed)
                print(f"seed {seed}: {_listed(played)}", *played.problems, sep="\n", flush=True)
                if args.shrink:
                    plan = _shrunk(plan, played, clocks)
                    print(f"the fewest: make simulate-faults SEEDS=1 SEED={seed} {_words(plan)}", flush=True)
                if args.keep:
                    keep(plan, args.keep)
            if args.seeds == 1:
                print(f"trace {played.trace}")
            if (took := _used_s()) > args.seconds:
                break
    print(f"{seed + 1 - args.seed} seeds, {faults_met} faults, {messages} messages, {seconds:.0f} virtual s", end=" ")
    print(f"in {took:.0f} s of a processor")
    print(f"runs: {', '.join(f'{number} {end}' for end, number in ends.most_common())}; bad seeds: {bad}")
    return 1 if bad else 0


def _try_guards(files: str, seeds: range, clocks: Path, limit_s: float) -> int:
    """Write down of each guard which seed goes wrong without it. The exit code is 1 if none does for one of them."""
    alive = 0
    write_table()
    for guard in guards(files):
        for seed in seeds:
            if _used_s() > limit_s:
                return 1 if alive else 0
            played = _apart(Plan(seed=seed, without=guard), clocks)
            if played.problems:
                keep_trial(guard, seed, 1 + seed - seeds.start)
                print(f"{guard}\n    dies of seed {seed}: {played.problems[0][:200]}", flush=True)
                break
        else:
            alive += 1
            keep_trial(guard, None, len(seeds))
            print(f"{guard}\n    no seed goes wrong without it", flush=True)
    return 1 if alive else 0


def _used_s() -> float:
    """Processor time of the plays, with their servers. On a busy machine, too, so many seconds are as many plays."""
    times = os.times()
    return times.children_user + times.children_system


def _listed(played: Played) -> str:
    return ", ".join(f"{number}: {fault}" for number, fault in played.faults.items())


def _words(plan: Plan) -> str:
    """The variables of the Makefile that play it, without its seed."""
    words = {
        "FLEET": plan.fleet if plan.fleet != "any" else "",
        "FAULTS": ",".join(plan.faults),
        "NUMBERS": ",".join(map(str, plan.numbers or ())),
    }
    return " ".join(f'{name}="{value}"' for name, value in words.items() if value)


def _shrunk(plan: Plan, played: Played, clocks: Path) -> Plan:
    """Leave out faults, more of them first, as long as something still goes wrong."""
    numbers = [*played.faults]
    size = len(numbers) // 2
    while size:
        at = 0
        while at < len(numbers):
            fewer = msgspec.structs.replace(plan, numbers=numbers[:at] + numbers[at + size :])
            if fewer.numbers and _apart(fewer, clocks).problems:
                numbers = [*fewer.numbers]
            else:
                at += size
        size //= 2
    return msgspec.structs.replace(plan, numbers=numbers)


def _apart(plan: Plan, clocks: Path) -> Played:
    """Play in a process of its own: what a play leaves in memory is part of no other."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            with (
                tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as name,
                VirtualServer(binary(), clocks, Path(name)) as server,
                os.fdopen(write, "wb") as out,
            ):
                out.write(msgspec.msgpack.encode(play(plan, server, Path(name))))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as out:
        result = out.read()
    os.waitpid(child, 0)
    return msgspec.msgpack.decode(result, type=Played)


if __name__ == "__main__":
    sys.exit(main())

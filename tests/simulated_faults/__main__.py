"""`python -m tests.simulated_faults`: plays seeds one after the other. The exit code is 1 if one of them went wrong."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec

from tests.servers import binary
from tests.simulated_faults.play import Fleet, Plan, Played, play
from tests.simulated_faults.virtual import VirtualServer, clock_library

_NO_RANDOM_ADDRESSES = 0x0040000
"""<sys/personality.h>"""


def main() -> int:
    """Play what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (1)")
    parser.add_argument("--fleet", choices=get_args(Fleet), default="any")
    parser.add_argument("--faults", default="", help="comma-separated names of the faults to inject (all)")
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
    ends, bad, faults_met, messages, seconds, began = Counter[str](), list[int](), 0, 0, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        clocks = clock_library(Path(name))
        for seed in range(args.seed, args.seed + args.seeds):
            plan = Plan(seed=seed, fleet=args.fleet, faults=faults, show=args.show)
            played = _apart(plan, clocks)
            faults_met, messages = faults_met + len(played.faults), messages + played.messages
            seconds += played.seconds
            ends.update(played.ends)
            if played.problems:
                bad.append(seed)
                print(f"seed {seed}: {', '.join(played.faults)}", *played.problems, sep="\n", flush=True)
            if args.seeds == 1:
                print(f"trace {played.trace}")
    took = time.monotonic() - began
    print(f"{args.seeds} seeds, {faults_met} faults, {messages} messages, {seconds:.0f} s in {took:.0f} s")
    print(f"runs: {', '.join(f'{number} {end}' for end, number in ends.most_common())}; bad seeds: {bad}")
    return 1 if bad else 0


def _apart(plan: Plan, clocks: Path) -> Played:
    """Play in a process of its own: what a play leaves in memory is part of no other."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            with (
                tempfile.TemporaryDirectory() as name,
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

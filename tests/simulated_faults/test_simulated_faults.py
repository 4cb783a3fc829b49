"""Seeds of the simulation: no run loses, doubles or reorders anything, and one seed is one trace."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from shutil import which

import pytest

from tests.servers import binary
from tests.simulated_faults import guards
from tests.simulated_faults.play import Kept, kept
from tests.simulated_faults.virtual import VirtualLoop, VirtualServer, clock_library, command

SEEDS = 4

pytestmark = pytest.mark.skipif(not which("cc"), reason="the server's clock needs a C compiler")


async def _simulated(*words: str, **env: str) -> str:
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.simulated_faults",
        *words,
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await made.communicate()
    finally:
        if made.returncode is None:
            made.kill()
    assert made.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.timeout(400)
async def test_nothing_is_lost_doubled_or_out_of_order_in_simulated_time() -> None:
    seed = os.environ.get("TOKENBUS_SEED") or str(random.randrange(10**6))
    await _simulated("--seed", seed, "--seeds", str(SEEDS), "--no-shrink")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("one", kept(), ids=[one.why for one in kept()])
async def test_a_seed_that_went_wrong_once_goes_well(one: Kept) -> None:
    plan = one.plan
    numbers = ",".join(map(str, plan.numbers or ()))
    words = ("--fleet", plan.fleet, "--faults", ",".join(plan.faults), "--numbers", numbers)
    await _simulated("--seed", str(plan.seed), *words, "--no-shrink")


class _Replies(asyncio.Protocol):
    def __init__(self) -> None:
        self.all = b""

    def data_received(self, data: bytes) -> None:
        self.all += data


def test_whom_a_command_reaches_is_told_at_the_commands_time(tmp_path: Path) -> None:
    readers = [_Replies() for _ in range(100)]
    with VirtualServer(binary(), clock_library(tmp_path), tmp_path) as server:
        loop = VirtualLoop(1, server)

        async def play() -> None:
            for replies in readers:
                wire, _ = await loop.create_connection(lambda replies=replies: replies)
                wire.write(command("HELLO", 3) + command("SUBSCRIBE", "news"))
            writer, _ = await loop.create_connection(_Replies)
            await asyncio.sleep(1.0)
            for n in range(100):  # the server is at times so fast that one alone shows nothing
                writer.write(command("PUBLISH", "news", f"told {n}"))
                await asyncio.sleep(0.1)
                assert sum(replies.all.endswith(b"told %d\r\n" % n) for replies in readers) == len(readers)

        try:
            loop.run_until_complete(play())
        finally:
            loop.close()


@pytest.mark.timeout(200)
async def test_the_same_seed_is_the_same_trace_wherever_its_memory_is() -> None:
    traces = set[str]()
    for count in (0, 24, 25, 27):  # variables that move what the process allocates, as another machine does
        more = {f"MORE_{n}": "0" * 7 * n for n in range(count)}
        output = await _simulated("--seed", "2", **more)
        traces |= {line for line in output.splitlines() if "trace" in line}
    assert len(traces) == 1


def test_the_page_has_the_guards_that_were_tried() -> None:
    assert guards.table() in guards.PAGE.read_text(encoding="utf-8"), "write it with: make simulate-faults GUARDS="
    assert all(trial.seeds for trial in guards.trials())

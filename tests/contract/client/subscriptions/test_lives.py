"""A subscriber that is killed a hundred times handles every event, and after dedupe by run and seq each once."""

from __future__ import annotations

import asyncio
import random
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.contract.client.writer import Writer
from tokenbus import Chunk
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

LIVES = 100
ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("kind", ["group", "cursor", "follow"])
async def test_a_subscriber_killed_a_hundred_times_sees_every_seq_once_after_dedupe(
    server_url: str, server: Server, keys: Keys, kind: str
):
    seed = random.randrange(2**32)
    print("seed", seed)
    writers = [Writer(server, keys, f"r{i}") for i in range(1 if kind == "follow" else 5)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.contract.client.subscriptions.lives",
        server_url, keys.prefix, kind, str(LIVES), str(seed),
        stdout=PIPE, cwd=ROOT,
    )  # fmt: skip
    handled = asyncio.create_task(process.communicate())
    try:
        for writer in writers:
            await writer.start()
        while not handled.done():  # there is always something to handle
            for writer in writers:
                await writer.say(*"abcdefghij")
            await asyncio.wait({handled}, timeout=0.01)
        out, _ = await handled
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    seen: dict[str, list[int]] = {writer.run: [] for writer in writers}
    for line in out.decode().splitlines():
        run, seq = line.split()
        seen[run].append(int(seq))
    assert sum(map(len, seen.values())) >= LIVES
    for writer in writers:
        written = [e.seq for e in writer.events if kind == "follow" or isinstance(e, Chunk)]
        once = list(dict.fromkeys(seen[writer.run]))
        assert once == written[: len(once)], f"{writer.run}: a gap, or out of order"
        assert once

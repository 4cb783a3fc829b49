"""The previous release beside this one: each kind of worker is replaced in turn under load, and back again.

The previous release is the newest tag `v*` before this commit, unpacked by `git archive` and run by this environment's
interpreter. Until there is one, the test is skipped.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import Fleet, Kind, Worker, ended
from tests.fork_server import ROOT
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, ToolCall, Turn

KINDS: tuple[Kind, ...] = ("parser", "normalizer", "fetcher", "tools")
WORDS = " ".join(f"word{n}" for n in range(30))
ROUNDS = int(os.environ.get("UPGRADE_ROUNDS", "1"))
"""How often there and back: `make upgrade-test ROUNDS=`."""
EACH = int(os.environ.get("UPGRADE_RUNS", "2"))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the previous release."""
    newest = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"]
    found = subprocess.run(newest, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("no release before this commit: it has no ancestor with a tag v*")
    packed = subprocess.run(["git", "archive", found.stdout.strip()], cwd=ROOT, capture_output=True, check=True)
    directory = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


async def test_each_kind_of_worker_is_replaced_by_the_next_release_and_back_under_load(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path, before: Path
) -> None:
    old = {"PYTHONPATH": f"{before / 'shared'}{os.pathsep}{before / 'services'}"}
    call = ToolCall(name="weather", arguments={"city": "Oslo"})
    script = Script(
        name="story",
        turns=(
            Turn(says=Reply(text=WORDS, tool_calls=(call,)), delivery=Delivery(pace=40)),
            Turn(says=Reply(text=WORDS), delivery=Delivery(pace=40)),
        ),
    )
    runs: list[str] = []
    async with MockProvider([script]) as provider:
        running = Fleet(tmp_path, server_url, keys, provider.url)
        try:
            workers: dict[Kind, Worker] = dict(zip(KINDS, await running.start(*KINDS, env=old), strict=True))
            assert "/before" in await imported_from(old), "the old workers are of the previous release"

            async def load() -> None:
                for _ in range(EACH):
                    runs.append(await send("story", tools=[WEATHER]))  # noqa: PERF401

            for env in [{}, old] * ROUNDS:
                joined = dict(zip(KINDS, await running.start(*KINDS, env=env), strict=True))
                for kind in KINDS:  # one after the other, so that every mixture of kinds works for a while
                    await load()
                    assert await workers[kind].stop() == 0
                workers = joined
            await load()
            logs: Any = await ended(server.client, keys, runs)
            async with Client(server_url, prefix=keys.prefix) as bus:
                results = await asyncio.gather(*(bus.result(run) for run in runs))
        finally:
            await running.stop()
    for run, result in zip(runs, results, strict=True):
        judge.check(logs[run])
        assert result.status == "completed"
        assert {event["attempt"] for event in logs[run]} <= {1, 2}
        assert judge.text(logs[run]).count("word29") == 2, "each turn was emitted once"
    assert await server.client.xlen(keys.dead) == 0, "nothing was refused"
    assert len(provider.requests) == 2 * len(runs), "no call was made twice"


async def imported_from(env: dict[str, str]) -> str:
    """Where an interpreter with these variables finds the services."""
    code = "import tokenbus, tokenbus_services as s; print(tokenbus.__file__, s.__file__)"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode()

"""Policies that block, die, allocate or never answer, in running services: each costs its own run, and no other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, Kind, ended, fleet
from tests.e2e.policies.test_policy_stage import decisions_of, policy
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, Reply, Script, Turn

POLICY: tuple[Kind, ...] = ("policy",)
REPLY = " ".join(f"word{i}" for i in range(30))
TALK = Script(name="talk", turns=(Turn(says=Reply(text=REPLY), delivery=Delivery(pace=40)),))
STARTS = 3
ONCE = {"Raises", "Never", "Late"}
"""Their executor survives them: no start counts."""
HARM = ("Sleeps", "Exits", "ExitsLater", "Raises", "Allocates", "TakesAll", "Never", "Deaf", "Late")
BLOCKING = {"Sleeps", "Deaf"}
"""They keep their executor for the whole of their timeout, in each start."""
LIMITS = "[limits]\npolicy_memory_bytes = 134217728\n"
PROBES = 4
"""Runs under a good policy that are under way at any time."""


def bad(use: str, on_error: str = "block", *, name: str = "", chunks: int = 2, timeout_s: float = 1.5) -> str:
    """A table of the settings."""
    table = f'\n[policies.{name or use.lower()}]\nuse = "tests.e2e.policies.bad_policies:{use}"\n'
    return table + f'on_error = "{on_error}"\ntimeout_s = {timeout_s}\noptions = {{ chunks = {chunks} }}\n'


GOOD = policy("good", "Replace", word="word1", by="W")
HEARD = REPLY.replace("word1", "W")


class Probes:
    """Keeps this many runs under a good policy open until `finish`."""

    def __init__(self, server: Server, keys: Keys, send: Send) -> None:
        self._server, self._keys, self._send = server, keys, send
        self._stopping = False
        self.ended = 0
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(PROBES)]

    async def _keep_one(self) -> None:
        while not self._stopping:
            run = await self._send("talk", policies=["good"])
            log: Any = (await ended(self._server.client, self._keys, [run]))[run]
            judge.check(log)
            assert log[-1]["type"] == "completed", log[-1]
            assert judge.text(log) == HEARD
            self.ended += 1

    async def finish(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def counted_starts(server: Server, keys: Keys, run: str, policy: str) -> int:
    """The starts that the run's hash has against a policy."""
    return int(await server.client.hget(keys.run(run), f"starts:{policy}") or 0)


async def lifecycle(server: Server, keys: Keys) -> list[tuple[str, str]]:
    """All runs, each as it started and as it ended, in the order in which the server wrote that down."""
    found: list[tuple[tuple[int, ...], str, str]] = []
    for p in range(keys.partitions):
        for entry_id, fields in await server.client.xrange(keys.topic(p, "runs")):
            event: dict[str, Any] = msgspec.json.decode(fields[b"__data__"])
            if event["type"] in ("started", *judge.TERMINAL):
                at = tuple(map(int, entry_id.split(b"-")))
                found.append((at, event["run"], "started" if event["type"] == "started" else "ended"))
    return [(run, what) for _, run, what in sorted(found)]


def starts(directory: Path, use: str, run: str) -> list[int]:
    """The process of each start of a policy for a run."""
    marks = directory / f"{use}-{run}"
    return [int(line) for line in marks.read_text().split()] if marks.exists() else []


@pytest.mark.timeout(300)
async def test_each_bad_policy_ends_its_own_run_by_its_on_error_and_touches_no_other(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    toml = LIMITS + GOOD
    for use in HARM:
        toml += bad(use) + bad(use, "pass", name=f"{use.lower()}_pass")
    async with deployed([TALK], PIPELINE, toml) as (_, services):
        await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        probes = Probes(server, keys, send)
        blocked = {await send("talk", policies=["good", use.lower()]): use for use in HARM}
        passed = {await send("talk", policies=["good", f"{use.lower()}_pass"]): use for use in HARM}
        policies = {run: (use, use.lower()) for run, use in blocked.items()}
        policies |= {run: (use, f"{use.lower()}_pass") for run, use in passed.items()}
        logs: Any = await ended(server.client, keys, [*blocked, *passed], timeout=240)
        meanwhile = probes.ended
        await probes.finish()
        order = await lifecycle(server, keys)
        decisions_published = {run: await decisions_of(server, keys, run) for run in logs}
        counted = {run: await counted_starts(server, keys, run, name) for run, (_, name) in policies.items()}
        owners = {await server.client.hget(keys.lease(p, "policy"), "owner") for p in range(keys.partitions)}
        log_text = services.workers[-1].log.read_text()
    for run, (use, name) in policies.items():
        judge.check(logs[run])
        # With pass there is one more start, as far as the policy came; it may end with the run before it is given back.
        due = {0} if use in ONCE else {STARTS, STARTS + 1} if run in passed else {STARTS}
        if use == "Allocates" and any(
            "no answer in" in d["reason"] for d in decisions_published[run] if d["action"] == "error"
        ):
            due = set(range(STARTS + 2))  # a slow machine: the timeout came before the memory was full
        assert counted[run] in due, (name, counted[run])
        assert {d["policy"] for d in decisions_published[run] if d["action"] == "error"} == {name}
    for run, use in blocked.items():
        end = logs[run][-1]
        assert (end["type"], end["finish"], end["error"]["code"]) == (
            "incomplete",
            "content_filter",
            "policy_terminated",
        )
        assert HEARD.startswith(judge.text(logs[run])), use
    for run, use in passed.items():
        assert logs[run][-1]["type"] == "completed", use
        assert judge.text(logs[run]) == HEARD, use
    # What blocks for seconds holds up no other: probes begin and end, one after the other, while it is under way.
    assert meanwhile >= 2 * PROBES
    probed = {run for run, _ in order} - set(policies)
    first_blocked = min(order.index((run, "started")) for run, (use, _) in policies.items() if use in BLOCKING)
    last_blocked = max(order.index((run, "ended")) for run, (use, _) in policies.items() if use in BLOCKING)
    between = order[first_blocked:last_blocked]
    whole = [run for run in probed if {(run, "started"), (run, "ended")} <= {*between}]
    assert len(whole) >= PROBES, order
    assert len(owners) == 1, "its partitions stayed with the one worker"
    assert "dropped:" not in log_text, "no lease was lost"


async def test_a_policy_that_blocks_for_less_than_its_timeout_ends_well_and_holds_up_no_other(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    toml = GOOD + bad("Naps", timeout_s=30)
    async with deployed([TALK], PIPELINE, toml) as (_, services):
        await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        slow = [await send("talk", policies=["naps"]) for _ in range(3)]
        quick = [await send("talk", policies=["good"]) for _ in range(4)]
        logs: Any = await ended(server.client, keys, quick)
        assert all([await server.client.hget(keys.run(run), "status") != b"completed" for run in slow])
        logs |= await ended(server.client, keys, slow)
    for run, log in logs.items():
        judge.check(log)
        assert log[-1]["type"] == "completed"
        assert judge.text(log) == (HEARD if run in quick else REPLY)


@pytest.mark.timeout(120)
async def test_the_count_of_starts_survives_the_worker(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    toml = GOOD + bad("Sleeps", timeout_s=2)
    async with deployed([TALK], PIPELINE, toml) as (_, services):
        [first] = await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        run = await send("talk", policies=["sleeps"])
        innocent = await send("talk", policies=["good"])
        # In the first start it stalled a shared executor, which is no evidence. The second one counts.
        await eventually(lambda: len(starts(tmp_path, "Sleeps", run)) == 3)
        first.kill()
        await first.process.wait()
        await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        logs: Any = await ended(server.client, keys, [run, innocent], timeout=60)
    assert logs[run][-1]["error"]["code"] == "policy_terminated"
    assert logs[innocent][-1]["type"] == "completed"
    # The start that was under way when its worker was killed does not count: the kill is not evidence against it.
    assert len(starts(tmp_path, "Sleeps", run)) == STARTS + 2


async def test_the_executors_of_a_killed_worker_end_with_it(
    server: Server, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    toml = GOOD + bad("Sleeps", timeout_s=600)
    async with deployed([TALK], PIPELINE, toml) as (_, services):
        [worker] = await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        run = await send("talk", policies=["sleeps"])
        await eventually(lambda: starts(tmp_path, "Sleeps", run))
        [executor] = starts(tmp_path, "Sleeps", run)
        worker.kill()
        await eventually(lambda: not _lives(executor))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("use", "problem"), [("Strange", "TypeError"), ("ImpatientAtStart", "SystemExit")])
async def test_a_policy_that_cannot_be_made_ends_its_worker_at_the_start_and_is_named(
    server_url: str, keys: Keys, tmp_path: Path, use: str, problem: str
) -> None:
    toml = f'\n[policies.bad]\nuse = "tests.e2e.policies.bad_policies:{use}"\n'
    async with fleet(tmp_path, server_url, keys, "http://127.0.0.1:9", (), toml) as workers:
        with pytest.raises(RuntimeError, match=rf"bad_policies:{use}.*constructor.*it raised {problem}"):
            await workers.start("policy")
        (worker,) = workers.workers
        assert worker.process.returncode
        worker.ends_with = (worker.process.returncode,)

"""A policy stage that is slow, or not there: runs that have policies wait at their sockets, and no other run does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Reply, Script, Turn

LAG_BYTES = 64 * 1024
WORDS = 2_000_000
"""A stream of some 14 MB: far more than sockets, buffers and the lags may hold. Its chunks are large: the
time that a run takes grows with their number."""
STILL_S = 2.0
"""A provider that sends nothing for so long is not read."""
MOST_READ = 12 * 2**20
TEXT = "word " * WORDS
LONG = Script(name="long", turns=(Turn(says=Reply(text=TEXT, chunk_size=250)),))
PAST_LAG = "word " * 20_000
"""Far more than the lag that is allowed, once it is drafts."""
MIDDLE = Script(name="middle", turns=(Turn(says=Reply(text=PAST_LAG, chunk_size=5)),))
SHORT = Script(name="short", turns=(Turn(says=Reply(text="That is all.")),))
TOML = f"""
[limits]
lag_bytes = {LAG_BYTES}
policy_slack_s = 300
block_characters = 16777216

[policies.plain]
use = "tokenbus.policy:ToolRules"

[policies.plain.options]
deny = ["shell"]
"""


async def drafts_waiting(server: Server, keys: Keys, partition: int) -> int:
    arrived, done = await server.client.hmget(keys.lease(partition, "policy"), ["arrived", "done"])
    return int(arrived or 0) - int(done or 0)


async def over(server: Server, keys: Keys, run: str) -> bool:
    return await drafts_waiting(server, keys, keys.partition_of(run)) > LAG_BYTES


@pytest.mark.timeout(300)
async def test_a_stalled_policy_stage_stops_the_reading_of_sockets_and_nothing_is_lost(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    clock = asyncio.get_running_loop().time
    async with deployed([LONG], PIPELINE, TOML) as (provider, services):
        (policy,) = await services.start("policy")
        policy.freeze()
        run = await send("long", policies=["plain"])
        exchange = await provider.requested()
        await eventually(lambda: over(server, keys, run), timeout=60)
        sent, since = -1, clock()

        def stands_still() -> bool:
            nonlocal sent, since
            if sent != exchange.bytes_sent:
                sent, since = exchange.bytes_sent, clock()
            return clock() - since > STILL_S

        await eventually(stands_still, timeout=60)
        # What waits on the server is bounded, and so the rest is still at the provider.
        assert await drafts_waiting(server, keys, keys.partition_of(run)) < LAG_BYTES + 2**20
        assert exchange.bytes_sent < MOST_READ
        assert not exchange.ended
        policy.thaw()
        log: Any = (await ended(server.client, keys, [run], timeout=120))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed"
    assert judge.text(log) == TEXT


@pytest.mark.timeout(300)
async def test_without_a_policy_worker_only_runs_with_policies_wait(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    names = [name for name in (f"run-{n}" for n in range(100)) if keys.partition_of(name) == 0]
    async with deployed([MIDDLE, SHORT], PIPELINE, TOML) as (provider, services):
        long = await send("middle", id=names[0], policies=["plain"])
        await eventually(lambda: over(server, keys, long), timeout=60)
        behind = await send("short", id=names[1], policies=["plain"])
        free = await send("short", id=names[2])
        logs: Any = await ended(server.client, keys, [free])
        assert judge.text(logs[free]) == "That is all."
        assert len(provider.requests) == 2, "the run behind the lag is not even called for"
        assert await drafts_waiting(server, keys, 0) < LAG_BYTES + 2**20
        found = await services.doctor()
        assert "no policy worker runs" in found
        assert "tokenbus worker policy" in found
        await services.start("policy")
        logs = await ended(server.client, keys, [long, behind], timeout=120)
        assert "no policy worker runs" not in await services.doctor()
    for run, text in ((long, PAST_LAG), (behind, "That is all.")):
        judge.check(logs[run])
        assert (logs[run][-1]["type"], judge.text(logs[run])) == ("completed", text)

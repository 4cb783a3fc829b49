"""The fence of verdicts: only the owner of the drafts may write them, and only for an open run."""

from __future__ import annotations

import pytest

from tests.contract.bus.state import everything
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

RUN = "r1"


class VerdictScene:
    """A run, and a policy worker that owns its partition's drafts."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server, self.keys = server, keys
        self.partition = keys.partition_of(RUN)
        self.events = keys.topic(self.partition, "events")
        self.token = ""

    async def own(self, worker: str) -> str:
        keys, p = self.keys, self.partition
        lease = keys.lease(p, "policy")
        await self.server.client.hdel(lease, "owner")
        call = scripts.acquire(lease, keys.topic(p, "drafts"), owner=worker, ttl_ms=10_000)
        self.token = (await run_script(self.server, call))[0].decode()
        return self.token

    async def run(self, status: str) -> None:
        await self.server.client.hset(self.keys.run(RUN), "status", status)
        await self.server.client.pexpire(self.keys.run(RUN), 60_000)

    async def rule(self, token: str | None = None) -> bytes:
        keys, p = self.keys, self.partition
        call = scripts.append_verdicts(
            keys.run(RUN),
            self.events,
            keys.lease(p, "parser"),
            keys.lease(p, "policy"),
            run=RUN,
            token=self.token if token is None else token,
            frame=b"ruling",
        )
        return await run_script(self.server, call)


@pytest.fixture
def scene(server: Server, keys: Keys) -> VerdictScene:
    return VerdictScene(server, keys)


async def test_the_owner_of_the_drafts_writes_a_verdict(scene: VerdictScene) -> None:
    await scene.own("w1")
    await scene.run("open")
    assert await scene.rule() == b"ok"
    ((_, fields),) = await scene.server.client.xrange(scene.events)
    assert fields == {RUN.encode(): b"ruling"}
    assert await scene.server.client.hget(scene.keys.lease(scene.partition, "parser"), "arrived") == b"6"


async def test_a_zombie_publishes_nothing_after_the_takeover(scene: VerdictScene) -> None:
    old = await scene.own("w1")
    await scene.own("w2")
    await scene.run("open")
    before = await everything(scene.server, scene.keys)
    assert await scene.rule(old) == b"fenced"
    assert await everything(scene.server, scene.keys) == before
    assert await scene.rule() == b"ok"


@pytest.mark.parametrize("status", ["cancelling", "expiring", "completed", ""])
async def test_nothing_is_emitted_for_a_run_that_is_not_open(scene: VerdictScene, status: str) -> None:
    await scene.own("w1")
    if status:
        await scene.run(status)
    before = await everything(scene.server, scene.keys)
    assert await scene.rule() == (status or "gone").encode()
    assert await everything(scene.server, scene.keys) == before

"""The starts that a run's hash holds against a policy: counted by the owner of its partition alone, and each once."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.leases import release
from tokenbus.bus.scripts.policies import Place, count_policy_start, note_place, note_unexplained, policy_starts
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

RUN, TOKEN = "run-1", "7:me"


class Counted:
    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.run_key, self.lease = keys.run(RUN), keys.lease(0, "policy")

    async def count(self, starts: int, *, token: str = TOKEN, failed_at: int = 0) -> Any:
        call = count_policy_start(self.run_key, self.lease, token=token, policy="p", starts=starts, failed_at=failed_at)
        return await run_script(self.server, call)

    async def read(self, *, token: str = TOKEN) -> Any:
        reply = await self.begin(token=token)
        return reply if isinstance(reply, bytes) else reply[3:]

    async def begin(self, *, token: str = TOKEN) -> Any:
        return await run_script(self.server, policy_starts(self.run_key, self.lease, token=token, policies=["p"]))

    async def lost(self, *, token: str = TOKEN) -> tuple[int, int]:
        """Workers that were lost with the run, as the owner reads it: beside others, and alone."""
        beside, alone, *_ = await self.begin(token=token)
        return int(beside or 0), int(alone or 0)

    async def move(self, to: Place, *, token: str = TOKEN) -> Any:
        return await run_script(self.server, note_place(self.run_key, self.lease, token=token, place=to))

    async def new_owner(self, token: str) -> None:
        await self.server.client.hset(self.lease, "token", token)


@pytest.fixture
async def counted(server: Server, keys: Keys) -> Counted:
    made = Counted(server, keys)
    await server.client.hset(made.lease, "token", TOKEN)
    await server.client.hset(made.run_key, "status", "open")
    await server.client.pexpire(made.run_key, 60_000)
    return made


async def test_a_start_whose_reply_was_lost_is_counted_once(counted: Counted):
    assert await counted.count(1, failed_at=4) == [1, 4]
    assert await counted.count(1, failed_at=4) == [1, 4]
    assert await counted.read() == [b"1", b"4"]


async def test_the_place_of_the_last_failure_stays_when_a_start_is_taken_back(counted: Counted):
    await counted.count(2, failed_at=9)
    assert await counted.count(1, failed_at=3) == [1, 9]
    assert await counted.count(0) == [0, 9]


async def test_a_worker_that_lost_the_partition_counts_nothing(counted: Counted):
    await counted.count(1)
    assert await counted.count(2, token="6:other") == b"fenced"
    assert await counted.read(token="6:other") == b"fenced"
    assert await counted.read() == [b"1", None]


@pytest.mark.parametrize(("status", "reply"), [("failed", b"failed"), ("", b"")])
async def test_nothing_is_counted_for_a_run_that_is_over(counted: Counted, status: str, reply: bytes):
    await counted.server.client.hset(counted.run_key, "status", status)
    assert await counted.count(1) == reply
    assert not await counted.server.client.hexists(counted.run_key, "starts:p")


async def test_nothing_is_counted_for_a_run_that_is_gone(counted: Counted):
    await counted.server.client.delete(counted.run_key)
    assert await counted.count(1) == b"gone"
    assert not await counted.server.client.exists(counted.run_key)


async def test_a_worker_lost_with_the_run_is_counted_once_if_it_had_the_run(counted: Counted):
    assert await counted.lost() == (0, 0)
    assert await counted.lost() == (0, 0), "the same owner reads again"
    await counted.new_owner("8:other")
    assert await counted.lost(token="8:other") == (1, 0)
    assert await counted.lost(token="8:other") == (1, 0), "the reply was lost"
    await counted.move("alone", token="8:other")
    await counted.new_owner("9:me")
    assert await counted.lost(token="9:me") == (1, 1)


async def test_a_worker_that_released_its_lease_was_not_lost(counted: Counted):
    await counted.begin()
    await counted.move("alone")
    assert await run_script(counted.server, release(counted.lease, token=TOKEN)) == 1
    await counted.new_owner("8:other")
    assert await counted.lost(token="8:other") == (0, 0)


async def test_a_worker_that_lost_the_partition_says_nothing_of_the_place(counted: Counted):
    await counted.begin()
    assert await counted.move("alone", token="6:other") == b"fenced"
    assert await counted.server.client.hget(counted.run_key, "policies_at") == f"beside {TOKEN}".encode()


async def test_unexplained_executor_ends_are_read_by_the_next_owner(counted: Counted):
    note = note_unexplained(counted.run_key, counted.lease, token=TOKEN, ends=2)
    assert [await run_script(counted.server, note) for _ in range(2)] == [2, 2]
    assert (await counted.begin())[2] == b"2"

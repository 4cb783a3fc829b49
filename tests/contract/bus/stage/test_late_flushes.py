"""A chained flush whose command or reply is late: what it writes is applied once, whatever the stages do meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as NoReply

from tests.contract.bus.stage.test_chain import Scene, before_script, script_of
from tests.contract.bus.toys import GROUP, NEXT
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import chain
from tokenbus.bus.stage import input as stage_input
from tokenbus.bus.stage.stage import Stage


async def test_what_is_read_one_by_one_while_a_flush_is_on_its_way_is_applied_once(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply comes after a stage whose reads failed has looked for the entry at fault, and found the new one."""
    read_one_by_one, found, flushed = stage_input.read_one_by_one, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any, **options: Any) -> Any:
        entries = await read_one_by_one(*args, **options)
        found.set()
        await flushed.wait()
        return entries

    monkeypatch.setattr(stage_input, "read_one_by_one", slowly)
    scene = Scene(server, Keys(f"{keys.prefix}-{uuid4().hex[:6]}", 1))
    await scene.open_runs("a")
    async with scene.worker(driven=True) as both:
        await both.until_short(a=b"+1")
        before = scene.frames["a"]
        send, held = server.client.execute_command, [both.first, both.second]

        async def execute_command(*args: Any, **options: Any) -> Any:
            if args[0] == "XREAD" and not flushed.is_set():
                raise NoReply("simulated")
            reply = await send(*args, **options)
            while held and script_of(args) == "chain":
                found.clear()
                await _fails(held.pop())
                await eventually(found.is_set)
            return reply

        server.client.execute_command = execute_command
        assert await both.write(a=b"+5") == "short"
        flushed.set()
        for stage in (both.first, both.second) * 2:
            await stage.process(await stage.read(block_ms=1))
        await both.until_short(a=b"+1")
        assert (await scene.log("a"))[before:] == [str(before + 5), str(before + 6)]


async def _fails(stage: Stage) -> None:
    while True:  # a stage that was woken reads nothing
        try:
            await stage.read(block_ms=1)
        except NoReply:
            return


class LateFlush:
    """Holds back the command of the next flush, which its worker gives up, until some commands later."""

    def __init__(self, server: Server, *, after: int, before_command: bool) -> None:
        """``before_command``: it arrives before the command that ``after`` others precede; else after it."""
        self._client = server.client
        self._send = self._client.execute_command
        self._after, self._before_command = after, before_command
        self._held: tuple[Any, ...] = ()
        self._seen = -1
        self.arrived = asyncio.Event()
        self._client.execute_command = self._execute_command

    def close(self) -> None:
        """Hold nothing more back."""
        self._client.execute_command = self._send

    async def _execute_command(self, *args: Any, **options: Any) -> Any:
        name = script_of(args)
        if self._seen < 0 and name == "chain":
            self._seen, self._held = 0, args
            raise ResponseError("WRONGTYPE simulated")
        if self._seen >= 0 and name == "attempt_fence.append_raw":  # is as late
            await self.arrived.wait()
        self._seen += self._seen >= 0
        if self._before_command:
            await self._arrive()
        reply = await self._send(*args, **options)
        await self._arrive()
        return reply

    async def _arrive(self) -> None:
        if self._held and self._seen > self._after:
            held, self._held = self._held, ()
            await self._send(*held)
            self.arrived.set()


@pytest.mark.parametrize("before_command", [True, False])
async def test_a_flush_that_arrives_after_it_was_given_up_is_written_once_or_not_at_all(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch, before_command: bool
) -> None:
    """It arrives at any of the commands that rebuild both stages; their states are of one moment all the same."""
    monkeypatch.setattr(chain, "FIRST_PAUSE_S", 0.0)
    scene = Scene(server, Keys(f"{keys.prefix}-{uuid4().hex[:6]}", 1))
    async with scene.worker() as both:
        for at in range(30):
            run = f"r{at}"
            await scene.open_runs(run)
            await both.until_short(**{run: b"+1"})
            ones = scene.frames[run]
            late = LateFlush(server, after=at, before_command=before_command)
            assert await both.write(**{run: b"+10"}) == "long"
            late.close()
            await eventually(scene.at_rest)
            await both.until_short(**{run: b"+100"})
            hundreds = scene.frames[run] - ones - 1
            expected = [*range(1, ones + 1), *(ones + 10 + 100 * n for n in range(hundreds + 1))]
            assert await scene.log(run) == list(map(str, expected)), f"late at command {at}"
            ids = [entry_id.decode() for entry_id, _ in await server.client.xrange(scene.keys.log(run))]
            assert ids == [f"1-{n}" for n in range(len(ids))], f"late at command {at}"


async def test_the_twin_of_a_flush_writes_nothing_however_late_it_arrives(server: Server, keys: Keys) -> None:
    scene = Scene(server, Keys(f"{keys.prefix}-{uuid4().hex[:6]}", 1))
    await scene.open_runs("a")
    send, sent = server.client.execute_command, list[tuple[Any, ...]]()

    async def execute_command(*args: Any, **options: Any) -> Any:
        if script_of(args) == "chain":
            sent.append(args)
        return await send(*args, **options)

    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        server.client.execute_command = execute_command
        for verdict in (b"already", b"moved"):
            assert await both.write(a=b"+1") == "short"
            before = await scene.log("a"), await scene.offsets()
            assert (await send(*sent[0]))[0] == verdict
            assert (await scene.log("a"), await scene.offsets()) == before
        server.client.execute_command = send


@pytest.mark.parametrize("group", [GROUP, NEXT])
async def test_a_flush_is_refused_if_either_stage_stands_elsewhere(server: Server, keys: Keys, group: str) -> None:
    scene = Scene(server, Keys(f"{keys.prefix}-{uuid4().hex[:6]}", 1))
    await scene.open_runs("a")
    async with scene.worker(driven=True) as both:
        await both.until_short(a=b"+1")
        before, lease = await scene.log("a"), scene.keys.lease(0, group)
        before_script(server, lambda: server.client.hset(lease, "offset", "9999999999999-0"))
        assert await both.write(a=b"+1") == "long"
        assert await scene.log("a") == before

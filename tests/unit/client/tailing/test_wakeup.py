"""The flag that readers wait for."""

from __future__ import annotations

import asyncio

from tokenbus.client.tailing import Wakeup


async def test_a_wait_ends_when_the_flag_is_set_and_at_once_while_it_is():
    flag = Wakeup()
    waiting = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    flag.set()
    flag.set()
    await waiting
    await flag.wait()


async def test_a_flag_waits_again_once_cleared_also_after_a_wait_that_was_given_up():
    flag = Wakeup()
    given_up = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    flag.set()
    flag.clear()
    waiting = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    flag.set()
    await waiting

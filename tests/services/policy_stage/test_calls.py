"""Runs in an executor: how they are stopped."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest

from tokenbus_services.policy_stage import calls, messages


@pytest.mark.parametrize("passes", range(6))
async def test_a_run_is_stopped_whenever_that_is_asked_while_deferred_work_ends(passes: int) -> None:
    """Also in the pass of the event loop in which it stops waiting for more drafts."""
    run = object.__new__(cast("Any", calls)._RunInExecutor)
    run._more = asyncio.Event()
    pending: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await run._until_known([pending])
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    pending.set_result(None)
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()


class _SlowToClose:
    pending = ()

    async def close(self) -> None:
        await asyncio.Event().wait()


async def test_a_run_that_is_closed_is_kept_until_it_ends() -> None:
    """The event loop has weak references to tasks alone."""
    executor: Any = object.__new__(calls.PolicyExecutor)
    executor._runs, executor._closing, executor._watching = {}, set(), object()
    executor.send = lambda message: None
    executor.stream = lambda opened, trace: _SlowToClose()
    executor._runs[1] = cast("Any", calls)._RunInExecutor(executor, SimpleNamespace(run="r", task=1))
    closing = ref(executor._runs[1].task)
    await asyncio.sleep(0)
    executor.handle(messages.Close(1))
    await asyncio.sleep(0)
    gc.collect()
    task = closing()
    assert task
    assert not task.done()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    await asyncio.sleep(0)  # in which the callbacks of the task run
    assert not executor._closing

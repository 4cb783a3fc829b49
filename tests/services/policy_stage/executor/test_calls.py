"""Runs in an executor: how they are stopped."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tokenbus_services.policy_stage.executor import calls


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

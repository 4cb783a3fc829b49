"""A test that runs into its timeout says what it waited for."""

from __future__ import annotations

import asyncio

from tests.awaited import all_paths, path_of


async def outer(event: asyncio.Event) -> None:
    await inner(event)


async def inner(event: asyncio.Event) -> None:
    await event.wait()


async def test_the_path_of_a_task_leads_to_what_it_waits_for() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(outer(event), name="waits")
    await asyncio.sleep(0)
    path = path_of(task)
    assert path.startswith("task waits: outer:")
    assert " > inner:" in path
    assert " > Event.wait:" in path
    assert path in all_paths()
    event.set()
    await task
    assert "task waits:" not in all_paths()

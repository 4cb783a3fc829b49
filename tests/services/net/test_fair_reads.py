"""A body is passed on so that others run between its parts, however much work each byte is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from tokenbus_services.net.http_client import FAIR_S, fair_reads


async def test_a_body_that_is_much_work_is_passed_on_in_parts_and_lets_others_run_between_them() -> None:
    content = bytes(range(256)) * 1024

    async def reads() -> AsyncIterator[bytes]:
        yield content

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    parts: list[bytes] = []
    async for part in fair_reads(reads()):
        parts.append(part)
        until = time.thread_time() + len(part) * 1e-6  # a microsecond for each byte
        while time.thread_time() < until:
            pass
    task.cancel()
    assert b"".join(parts) == content
    assert max(len(part) for part in parts[1:]) <= 4 * FAIR_S * 1e6
    assert turns > len(parts) // 4 > 10


async def test_a_body_that_is_little_work_is_passed_on_in_whole_reads_after_the_first() -> None:
    async def reads() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield bytes(64 * 1024)

    parts = [len(part) async for part in fair_reads(reads())]
    assert sum(parts) == 10 * 64 * 1024
    assert parts[-1] == 64 * 1024

"""The marks of an executor that its worker can read, also after it died."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tokenbus_services.executor.marks import MarkedCall, Marking, MarksPage, current_call
from tokenbus_services.executor.protocol import Frames, TooLong, framed

CALL = MarkedCall(3, 1, 8)


@pytest.fixture
def page() -> Iterator[MarksPage]:
    page = MarksPage()
    yield page
    page.close()


def _freed_bytes() -> int:
    """How much more memory this process once had than it has now."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - now)


def test_another_process_reads_which_call_is_at_work(page: MarksPage):
    other = MarksPage(os.dup(page.fd))
    other.begin(CALL)
    assert page.read().call == CALL
    other.end()
    assert page.read().call is None
    other.close()


def test_each_step_has_a_number_of_its_own(page: MarksPage):
    page.begin(CALL)
    first = page.read().step
    page.end()
    page.begin(CALL)
    assert page.read().step > first


def test_what_takes_memory_is_known_by_its_call(page: MarksPage):
    marking = Marking(page)
    marking.begin(CALL)
    # The system counts a peak, and an earlier test of this process may have had a higher one.
    size = _freed_bytes() + 2**26
    taken = bytearray(size)
    taken[::4096] = b"x" * len(taken[::4096])
    marking.end(CALL)
    assert len(taken) == size
    assert (page.read().grew, page.read().grew_bytes >= 2**25) == (CALL, True)


def test_steps_of_tasks_that_a_call_started_are_the_calls_and_no_others(page: MarksPage):
    seen: list[MarkedCall | None] = []

    async def look() -> None:
        seen.append(page.read().call)
        await asyncio.sleep(0)
        seen.append(page.read().call)

    async def main() -> None:
        Marking(page).install(asyncio.get_running_loop())
        await asyncio.create_task(look())
        token = current_call.set(CALL)
        started = asyncio.create_task(look())
        current_call.reset(token)
        await started
        assert page.read().call is None

    asyncio.run(main())
    assert seen == [None, None, CALL, CALL]


def test_messages_come_out_whole_however_they_are_cut():
    sent = [[1], ["feed", 2, b"x" * 300, b""], [3]]
    data = b"".join(map(framed, sent))
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        assert [msgspec.msgpack.decode(body) for part in parts for body in frames.feed(part)] == sent


def test_a_message_over_the_limit_is_refused_before_it_is_held():
    with pytest.raises(TooLong):
        list(Frames(100).feed(framed(b"x" * 200)[:8]))

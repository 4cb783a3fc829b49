"""Threads of synchronous tools: bounded, given up, never in the way."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from tests.services.tools.conftest import until
from tokenbus_services.tools.python.thread_pool import NoThread, Threads


async def test_a_call_returns_or_raises_what_it_does_in_its_thread() -> None:
    threads = Threads(1)
    assert await threads.run(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: "still there") == "still there"


async def test_no_more_calls_run_at_once_than_allowed() -> None:
    threads, lock = Threads(3), threading.Lock()
    running = most = 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(12)))
    assert most == 3


async def test_a_given_up_call_keeps_its_place_until_it_ends() -> None:
    threads, go = Threads(1), threading.Event()
    task = asyncio.create_task(threads.run(go.wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.given_up == 1
    with pytest.raises(NoThread):
        await threads.run(lambda: None)
    go.set()
    await until(lambda: threads.given_up == 0)
    assert await threads.run(lambda: "free again") == "free again"


async def test_a_call_that_was_given_up_while_it_waited_never_runs() -> None:
    threads, go, ran = Threads(1), threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(go.wait))
    second = asyncio.create_task(threads.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    go.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (threads.given_up, ran.is_set()) == (0, False)


async def test_a_call_sees_the_context_variables_of_its_caller() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    assert await Threads(1).run(variable.get) == "set"


def test_a_hung_thread_does_not_keep_the_process_from_exiting() -> None:
    program = """
import asyncio, threading
from tokenbus_services.tools.python.thread_pool import Threads

async def main():
    try:
        async with asyncio.timeout(0.01):
            await Threads(1).run(threading.Event().wait)
    except TimeoutError:
        print("gave up")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "gave up\n"

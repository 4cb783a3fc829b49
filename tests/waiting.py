"""Waiting for a condition, in place of sleeping for a time.

The default is long: it is over only in a test that fails, and a loaded machine is slow.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from redis.exceptions import TimeoutError as NoAnswer

T = TypeVar("T")


async def eventually(condition: Callable[[], T | Awaitable[T]], *, timeout: float = 60.0) -> T:
    """Ask until the answer is truthy, and return it.

    An AssertionError inside the condition is a "not yet"; so is a server that gave no answer in time, as on a loaded
    machine.
    """
    attempts = _Attempts(timeout)
    for pause in attempts:
        try:
            answer: Any = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            attempts.last = repr(answer)
        except (AssertionError, NoAnswer) as e:
            attempts.last = str(e)
        await asyncio.sleep(pause)
    raise attempts.failure(condition)


def eventually_sync(condition: Callable[[], T], *, timeout: float = 60.0) -> T:
    """The same without a running event loop."""
    attempts = _Attempts(timeout)
    for pause in attempts:
        try:
            if answer := condition():
                return answer
            attempts.last = repr(answer)
        except AssertionError as e:
            attempts.last = str(e)
        time.sleep(pause)
    raise attempts.failure(condition)


class _Attempts:
    """Pauses that grow from 2 to 100 ms, until the time is over."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.last = ""

    def __iter__(self) -> Iterator[float]:
        deadline = time.monotonic() + self.timeout
        pause = 0.002
        while time.monotonic() < deadline:
            yield pause
            pause = min(pause * 1.5, 0.1)

    def failure(self, condition: Callable[[], object]) -> AssertionError:
        name = getattr(condition, "__qualname__", repr(condition))
        return AssertionError(f"{name} did not come true within {self.timeout:g} s; last answer: {self.last}")

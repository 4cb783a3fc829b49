"""Communication of the bench with its own processes: jobs and answers in lists of the server under test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import redis
import redis.asyncio

T = TypeVar("T")

BLOCK_S = 2
CHAIN = ["source", "hop1", "hop2"]
"""The bare chain, in the order in which a chunk passes it."""


class Load(msgspec.Struct, frozen=True):
    """The load: number of runs, chunks of each, and ``pace`` in chunks a second; 0 means as fast as possible."""

    runs: int
    chunks: int
    pace: float = 0.0

    @property
    def name(self) -> str:
        """The name of the provider's script for this load."""
        return f"chunks-{self.chunks}-pace-{self.pace:g}"

    @property
    def total(self) -> int:
        """All chunks of all runs."""
        return self.runs * self.chunks

    @property
    def stagger_s(self) -> float:
        """Seconds between the starts of two runs, so that their chunks are spread evenly over the time."""
        return (1 + 1 / self.runs) / self.pace if self.pace else 0.0

    @property
    def timeout_s(self) -> float:
        """The deadline for the arrival of all chunks; far longer than expected."""
        return 30 + (self.runs * self.stagger_s + self.chunks / self.pace if self.pace else self.total / 500)


class Listen(msgspec.Struct, frozen=True):
    """The subscriber's job: read these streams until this many stamps have arrived."""

    streams: list[str]
    stamps: int
    timeout_s: float


class Received(msgspec.Struct, frozen=True):
    """The subscriber's answer: arrays of int64, nanoseconds of the monotonic clock, which all processes share."""

    sent: bytes
    arrived: bytes


def _jobs(name: str) -> str:
    return f"bench:jobs:{name}"


def _answers(name: str) -> str:
    return f"bench:answers:{name}"


class Desk:
    """The bench's side."""

    def __init__(self, client: redis.Redis, check: Callable[[], None]) -> None:
        """``check`` raises if a process has ended."""
        self._client: Any = client
        self._check = check

    def give(self, name: str, job: msgspec.Struct) -> None:
        self._client.rpush(_jobs(name), msgspec.msgpack.encode(job))

    def answer(self, name: str, kind: type[T], timeout_s: float) -> T:
        """The next answer of a process. Raises TimeoutError, and RuntimeError if a process has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := self._client.blpop(_answers(name), timeout=BLOCK_S):
                return msgspec.msgpack.decode(found[1], type=kind)
            self._check()
        raise TimeoutError(f"{name} gave no answer within {timeout_s:g} s")


class Worker:
    """A process's side."""

    def __init__(self, client: redis.asyncio.Redis, name: str) -> None:
        self._client: Any = client
        self._name = name

    async def job(self, kind: type[T]) -> T:
        while True:
            found = await self._client.blpop(_jobs(self._name), timeout=BLOCK_S)
            if found:
                return msgspec.msgpack.decode(found[1], type=kind)

    async def answer(self, answer: Any) -> None:
        """Report the result of a job."""
        await self._client.rpush(_answers(self._name), msgspec.msgpack.encode(answer))

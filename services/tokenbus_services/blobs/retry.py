"""Storing with a little patience: some tries, then a rest, so that a store that is away costs many images one wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Generic, TypeVar

from tokenbus.errors import BlobError, BlobUnavailable

TRIES = 3
PAUSE_S = 0.1
"""Between two tries."""
REST_S = 5.0
"""After a store that was away it is not tried again for so long."""

T = TypeVar("T")


class Patience(Generic[T]):
    """In front of one store, for all that store there."""

    def __init__(self, store: Callable[[bytes | AsyncIterable[bytes], str], Awaitable[T]]) -> None:
        """``store`` may raise what it likes: what is no BlobError is taken for a store that is away."""
        self._store = store
        self._rests_until = 0.0

    async def put(self, content: Callable[[], bytes | AsyncIterable[bytes]], media_type: str, *, until: float) -> T:
        """What the store answers; ``content`` makes it for each try, ``until`` is in the event loop's time.

        Raises BlobError: BlobUnavailable also while the store is left alone, and where it takes longer.
        """
        clock = asyncio.get_running_loop().time
        if clock() < self._rests_until:
            raise BlobUnavailable("blobs", "the blob store was away a moment ago")
        began = clock()
        try:
            async with asyncio.timeout_at(until):
                return await self._tried(content, media_type)
        except TimeoutError:
            problem: BlobError = BlobUnavailable("blobs", f"not stored within {clock() - began:.0f} s")
        except BlobError as e:
            if not e.retryable:
                raise
            problem = e
        except Exception as e:
            problem = BlobUnavailable("blobs", f"{type(e).__name__}: {e}")
        self._rests_until = clock() + REST_S
        raise problem

    async def _tried(self, content: Callable[[], bytes | AsyncIterable[bytes]], media_type: str) -> T:
        for _ in range(TRIES - 1):
            try:
                return await self._store(content(), media_type)
            except BlobError as e:
                if not e.retryable:
                    raise
            await asyncio.sleep(PAUSE_S)
        return await self._store(content(), media_type)

"""Stores blobs with a few retries and a cool-down, so that an unavailable store delays many images only once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Generic, TypeVar

from tokenbus.bus import process_clock
from tokenbus.errors import BlobError, BlobUnavailable

TRIES = 3
PAUSE_S = 0.1
"""Pause between two tries."""
COOL_DOWN_S = 5.0
"""Cool-down after a failure, during which the store is not tried."""

T = TypeVar("T")


class StoreRetry(Generic[T]):
    """Retries and cool-down for one store, shared by all its users."""

    def __init__(self, store: Callable[[bytes | AsyncIterable[bytes], str], Awaitable[T]]) -> None:
        """``store`` may raise anything: exceptions other than BlobError count as an unavailable store."""
        self._store = store
        self._cooling_down_until = 0.0

    async def put(self, content: Callable[[], bytes | AsyncIterable[bytes]], media_type: str, *, until: float) -> T:
        """Store content and return the store's answer. ``content`` is called for each try; ``until`` is a time
        of the process's clock.

        Raises BlobError; BlobUnavailable also during the cool-down and on timeout.
        """
        clock = process_clock.now
        if clock() < self._cooling_down_until:
            raise BlobUnavailable("blobs", "the blob store was unavailable a moment ago")
        began = clock()
        try:
            async with process_clock.timeout(until - began):
                return await self._store_with_retries(content, media_type)
        except TimeoutError:
            problem: BlobError = BlobUnavailable("blobs", f"not stored within {clock() - began:.0f} s")
        except BlobError as e:
            if not e.retryable:
                raise
            problem = e
        except Exception as e:
            problem = BlobUnavailable("blobs", f"{type(e).__name__}: {e}")
        self._cooling_down_until = clock() + COOL_DOWN_S
        raise problem

    async def _store_with_retries(self, content: Callable[[], bytes | AsyncIterable[bytes]], media_type: str) -> T:
        for _ in range(TRIES - 1):
            try:
                return await self._store(content(), media_type)
            except BlobError as e:
                if not e.retryable:
                    raise
            await asyncio.sleep(PAUSE_S)
        return await self._store(content(), media_type)

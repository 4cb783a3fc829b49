"""Reads untrusted bodies in pieces of any size without starving the rest of the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable

CRUMB_BYTES = 4
MAX_CRUMBS = 20_000
"""After this many reads, an average below `CRUMB_BYTES` is an error: each read costs as much as a whole event."""
FAIR_READS = 16
"""Yield to other tasks after this many reads: those of a body that has arrived already never wait."""


class TooManyCrumbs(Exception):
    """The body arrives in too many small reads."""

    def __init__(self, reads: int) -> None:
        super().__init__(f"the response came in {reads} pieces averaging less than {CRUMB_BYTES} bytes")


async def fair_reads(reads: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Pass on the reads, yielding to other tasks regularly. Raises TooManyCrumbs, and any exception of ``reads``."""
    size = count = 0
    async for read in reads:
        size += len(read)
        count += 1
        if count > MAX_CRUMBS and size < count * CRUMB_BYTES:
            raise TooManyCrumbs(count)
        yield read
        if count % FAIR_READS == 0:
            await asyncio.sleep(0)

"""Reads of somebody else's body that leave room for everything else of the process, however the body is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable

CRUMB_BYTES = 4
MAX_CRUMBS = 20_000
"""So many reads may bring less than `CRUMB_BYTES` each on average: each costs as much as a whole event."""
FAIR_READS = 16
"""After so many reads in a row the others get their turn: chunks of a byte come by the thousand in one packet."""


class TooManyCrumbs(Exception):
    """The body comes in too many reads for what it says."""

    def __init__(self, reads: int) -> None:
        super().__init__(f"the answer came in {reads} chunks of less than {CRUMB_BYTES} bytes each")


async def fair_reads(reads: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """These reads, with a pause after each few of them. Raises TooManyCrumbs, and what ``reads`` raises."""
    size = count = 0
    async for read in reads:
        size += len(read)
        count += 1
        if count > MAX_CRUMBS and size < count * CRUMB_BYTES:
            raise TooManyCrumbs(count)
        yield read
        if count % FAIR_READS == 0:
            await asyncio.sleep(0)

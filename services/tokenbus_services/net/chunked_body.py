"""The body of an answer in HTTP chunks, taken from the connection in as few pieces as it came.

A provider sends each event as an HTTP chunk of its own, and one packet holds many. The HTTP library returns them one by
one through seven layers, which costs a fetcher more than everything else that it does with an event. Here one read is
one piece. The library handles the end of the body and all that is not plain chunks, with its own errors.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable

import httpcore
import httpx

from tokenbus_services.net.connection import Connection

READ_BYTES = 64 * 1024
"""Maximum bytes decoded at once: thousands of chunks of one byte each must not hold up the others."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_SIZE_BYTES = 17
"""A longer line is not a plain chunk size."""


class ChunkDecoder:
    """Decodes plain chunks (RFC 9112, section 7.1). No IO."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the current chunk's data that are still to come."""
        self._in_chunk = False
        self._held = b""
        """The beginning of a line."""
        self.rest: bytes | None = None
        """Set when the decoder is done: bytes that begin at a chunk's size and are not decoded, because the body ends
        there or is not made of plain chunks.
        """
        self.malformed: bytes | None = None
        """Set, besides `rest`, if a chunk is not followed by the end of a line: what follows it."""

    def feed(self, data: bytes) -> bytes:
        """Return the content of these bytes. Not to be called once `rest` is set."""
        data, self._held = self._held + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while True:
            if self._in_chunk:
                end = at + self._left
                if end > at:
                    pieces.append(data[at:end])
                self._left = max(0, end - size)
                if end >= size:
                    break
                if data[end : end + 2] != b"\r\n":
                    if data[end:] == b"\r":
                        self._held = b"\r"
                    else:
                        self.malformed, self.rest = data[end : end + 2], b""
                    break
                self._in_chunk = False
                at = end + 2
            line = _SIZE.match(data, at)
            if line is None:
                if b"\n" in data[at : at + _SIZE_BYTES] or size - at >= _SIZE_BYTES:
                    self.rest = data[at:]
                else:
                    self._held = data[at:]
                break
            self._left = int(line[1], 16)
            if not self._left:
                self.rest = data[at:]
                break
            self._in_chunk = True
            at = line.end()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stop(self) -> None:
        """Decode nothing more: sets `rest`. In the middle of a chunk it begins with the size of what is missing."""
        if self.rest is None:
            self.rest = b"%x\r\n" % self._left if self._in_chunk and self._left else self._held


class ChunkedBody(httpx.AsyncByteStream):
    """The body of a chunked answer whose connection stands right behind the head."""

    def __init__(self, body: httpx.AsyncByteStream, connection: Connection, *, timeout_s: float | None) -> None:
        """``body``: as the HTTP library reads it. ``timeout_s``: longest wait for one read."""
        self._body = body
        self._connection = connection
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        """Raises httpx.TransportError."""
        decoder = ChunkDecoder()
        while decoder.rest is None:
            try:
                data = await self._connection.read(READ_BYTES, self._timeout_s)
                if data:
                    data = decoder.feed(data)
                else:
                    decoder.stop()
            except httpcore.ReadTimeout as e:
                raise httpx.ReadTimeout(str(e)) from e
            except httpcore.ReadError as e:
                raise httpx.ReadError(str(e)) from e
            if data:
                yield data
        if decoder.malformed is not None:
            raise httpx.RemoteProtocolError(f"malformed chunk footer: {decoder.malformed!r}")
        self._connection.unread(decoder.rest)
        async for data in self._body:
            yield data

    async def aclose(self) -> None:
        await self._body.aclose()


# Reads untrusted bodies in pieces of any size without starving the rest of the process.

CRUMB_BYTES = 4
MAX_CRUMBS = 20_000
"""After this many reads, an average below `CRUMB_BYTES` is an error: each read costs as much as a whole event."""
FAIR_READS = 16
"""Yield to other tasks after this many reads: those of a body that has arrived already never wait."""
FAIR_S = 0.002
"""Yield also after this much work on them. If a read needs more, the next ones are passed on in smaller parts."""
FIRST_PART_BYTES, LEAST_PART_BYTES = 16 * 1024, 1024


class TooManyCrumbs(Exception):
    """The body arrives in too many small reads."""

    def __init__(self, reads: int) -> None:
        super().__init__(f"the response came in {reads} pieces averaging less than {CRUMB_BYTES} bytes")


async def fair_reads(reads: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Pass on the reads, yielding to other tasks regularly, however much work each byte is. Raises TooManyCrumbs, and
    any exception of ``reads``.
    """
    clock = time.thread_time  # time in which another process has the core is no work
    size = count = 0
    most, spent = FIRST_PART_BYTES, 0.0
    async for read in reads:
        size += len(read)
        count += 1
        if count > MAX_CRUMBS and size < count * CRUMB_BYTES:
            raise TooManyCrumbs(count)
        at = 0
        while at < len(read):
            part = read[at : at + most]
            at += len(part)
            begun = clock()
            yield part
            took = clock() - begun
            spent += took
            if took > FAIR_S:
                most = max(LEAST_PART_BYTES, int(len(part) * FAIR_S / took))
            elif len(part) == most < READ_BYTES:
                most *= 2
            if spent > FAIR_S or count % FAIR_READS == 0:
                spent = 0.0
                await asyncio.sleep(0)

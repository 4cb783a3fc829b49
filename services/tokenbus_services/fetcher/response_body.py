"""The body of a provider's answer: decoded a piece at a time, and bounded, whatever the provider sends.

Requests ask for `Accept-Encoding: identity`. Some gateways compress anyway, so gzip and deflate are decoded here, in
steps whose output is bounded: without a bound one read becomes 64 MB, and 64 GB where one coding is inside of another.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing

import httpx

from tokenbus.events.error_info import ErrorInfo
from tokenbus.providers.response.decoder import MAX_ERROR_BODY_BYTES
from tokenbus_services.net.fair_reads import FAIR_READS, TooManyCrumbs, fair_reads

PIECE_BYTES = 64 * 2**10
"""Most that one step of decoding gives."""
MAX_RATIO = 200
"""Most bytes of content for one byte of a compressed body. A model's text has 3 to 30; DEFLATE reaches 1,032."""
FREE_BYTES = 4 * 2**20
"""So much content may come of any compressed body: a short one that is all blanks is no attack."""

_CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_GZIP_MAGIC = b"\x1f\x8b"


class BodyRefused(Exception):
    """The body cannot be read, or is read no further; ``error`` says why."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


def described(error: BaseException) -> str:
    """The error in words. One that says nothing itself says by what it was caused: the connection was reset, say."""
    told: BaseException | None = error
    while told is not None and not str(told):
        told = told.__cause__ or told.__context__
    if told is None:
        return type(error).__name__
    return (
        f"{type(error).__name__}: {told}" if told is error else f"{type(error).__name__}: {type(told).__name__}: {told}"
    )


async def read_body(response: httpx.Response, *, limit: int) -> AsyncGenerator[bytes]:
    """The content of an answer in pieces, none empty.

    The body of an error ends at `MAX_ERROR_BODY_BYTES`, or where it does not decode: its status says enough. Raises
    BodyRefused for another's that is over ``limit`` bytes or does not decode, and httpx.TransportError.
    """
    if response.status_code < 300:
        async with aclosing(_content(response, limit)) as pieces:
            async for piece in pieces:
                yield piece
        return
    left = MAX_ERROR_BODY_BYTES
    try:
        async with aclosing(_content(response, limit)) as pieces:
            async for piece in pieces:
                yield piece[:left]
                left -= len(piece)
                if left <= 0:
                    return
    except BodyRefused:
        return


async def beginning(response: httpx.Response, limit: int) -> bytes:
    """What the body begins with, and its end where that is within ``limit`` bytes. Raises as `read_body`."""
    content = bytearray()
    async with aclosing(read_body(response, limit=limit + PIECE_BYTES)) as pieces:
        async for piece in pieces:
            content += piece
            if len(content) >= limit:
                break
    return bytes(content[:limit])


async def _content(response: httpx.Response, limit: int) -> AsyncGenerator[bytes]:
    coding = coding_of(response.headers.get("content-encoding", ""))
    inflate = Inflate(coding) if coding else None
    size = steps = 0
    async for read in _reads(response):
        for piece in inflate.feed(read) if inflate else (read,):
            size += len(piece)
            if size > limit:
                raise BodyRefused(
                    ErrorInfo(
                        code="answer_too_large",
                        kind="limit",
                        message=f"the answer has over {limit} bytes (`limits.answer_bytes`)",
                    )
                )
            if piece:
                yield piece
            steps += 1
            if inflate and steps % FAIR_READS == 0:
                await asyncio.sleep(0)
    if inflate:
        inflate.end()


async def _reads(response: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(fair_reads(response.aiter_raw())) as reads:
            async for read in reads:
                yield read
    except TooManyCrumbs as e:
        raise BodyRefused(ErrorInfo(code="answer_chunks", kind="limit", message=str(e))) from None


def coding_of(header: str) -> str | None:
    """The one coding that a `Content-Encoding` names; None: there is none. Raises BodyRefused for one that is not
    decoded here, and for one inside of another."""
    codings = [name for part in header.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _CODINGS:
        told = ", ".join(codings)[:80]
        message = f"the answer is encoded as {told!r}; not asked for, and not one of {', '.join(_CODINGS)} alone"
        raise BodyRefused(ErrorInfo(code="body_encoding", kind="protocol", message=message, where="content-encoding"))
    return codings[0]


class Inflate:
    """Decodes one compressed body: `feed` it all that is read, then `end`. Both raise BodyRefused."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = zlib.decompressobj(_CODINGS[coding])
        self._head: bytes = b""
        """Bytes too few to tell what they begin: a `deflate` body with or without its header, or a gzip member."""
        self._read = self._given = 0

    def feed(self, data: bytes) -> Generator[bytes]:
        """The content of these bytes, in pieces."""
        self._read += len(data)
        if not self._given and self._coding == "deflate":
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return
            self._head = b""
            if data[0] & 0x0F != 8 or int.from_bytes(data[:2]) % 31:  # RFC 1950; some servers leave its header out
                self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
            self._coding = "deflate, looked at"
        if self._inflate.eof:
            data, self._head = self._head + data, b""
        while not (self._inflate.eof and not self._next_member(data)):
            try:
                piece = self._inflate.decompress(data, PIECE_BYTES)
            except zlib.error as e:
                raise self._undecodable(str(e)) from None
            self._given += len(piece)
            taken = self._read - len(self._inflate.unconsumed_tail)
            if self._given > FREE_BYTES and self._given > MAX_RATIO * taken:
                message = f"{taken} bytes of the compressed answer became {self._given}, over {MAX_RATIO} each"
                raise BodyRefused(ErrorInfo(code="body_ratio", kind="limit", message=message))
            yield piece
            data = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            if not data and len(piece) < PIECE_BYTES:  # of a piece that is full, zlib may hold the rest
                return

    def end(self) -> None:
        """The body ended."""
        if self._read and not self._inflate.eof:
            raise self._undecodable("it breaks off")

    def _next_member(self, data: bytes) -> bool:
        """A gzip body may have several members, one after the other; what else follows the last one is padding."""
        if self._coding == "deflate, looked at":
            return False
        if not data.startswith(_GZIP_MAGIC):
            self._head = data if data == _GZIP_MAGIC[:1] else b""
            return False
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        return True

    def _undecodable(self, problem: str) -> BodyRefused:
        message = f"the compressed answer does not decode: {problem}"
        return BodyRefused(ErrorInfo(code="body_undecodable", kind="protocol", message=message, retryable=True))

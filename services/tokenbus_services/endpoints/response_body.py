"""The body of a provider's answer, decoded in pieces and bounded for any input.

Requests ask for `Accept-Encoding: identity`, but some gateways compress anyway. So gzip and deflate are decoded here,
in steps with bounded output: without a bound one read becomes 64 MB, and 64 GB with nested codings.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import cast

import httpx

from tokenbus.errors import WireError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.providers.response import aws_frames
from tokenbus.providers.response.decoder import MAX_ERROR_BODY_BYTES
from tokenbus.providers.response.error_mapping import wire_failure
from tokenbus_services.net.http_client import FAIR_READS, TooManyCrumbs, fair_reads

PIECE_BYTES = 64 * 2**10
"""Maximum output of one decoding step."""
MAX_RATIO = 200
"""Maximum bytes of content per byte of a compressed body. A model's text has 3 to 30; DEFLATE reaches 1,032."""
FREE_BYTES = 4 * 2**20
"""Content that any compressed body may have regardless of its ratio: a short body of blanks is not an attack."""

_CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_GZIP_MAGIC = b"\x1f\x8b"


class BodyRefused(Exception):
    """The body cannot be read, or exceeds a limit; ``error`` says why."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


def described(error: BaseException) -> str:
    """Describe the error. If it has no text, describe its cause, such as a connection reset."""
    cause: BaseException | None = error
    while cause is not None and not str(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return type(error).__name__
    return (
        f"{type(error).__name__}: {cause}"
        if cause is error
        else f"{type(error).__name__}: {type(cause).__name__}: {cause}"
    )


def read_body(response: httpx.Response, *, limit: int) -> AsyncGenerator[bytes]:
    """Yield the content of an answer in non-empty pieces.

    An error's body is cut at `MAX_ERROR_BODY_BYTES`, or at the first byte that does not decode: its status is enough.
    AWS's binary frames become the server-sent events that they stand for. For other answers raises BodyRefused if the
    content exceeds ``limit`` bytes or does not decode, and httpx.TransportError.
    """
    if response.status_code >= 300:
        return _error_content(response, limit)
    content = _content(response, limit)
    framed = response.headers.get("content-type", "").partition(";")[0].strip().lower() == aws_frames.MEDIA_TYPE
    return _unframed(content) if framed else content


async def _unframed(content: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    frames = aws_frames.AwsFrames()
    async with aclosing(content) as pieces:
        async for piece in pieces:
            try:
                events = frames.feed(piece)
            except WireError as e:
                raise BodyRefused(wire_failure(e)) from None
            if events:
                yield events


async def _error_content(response: httpx.Response, limit: int) -> AsyncGenerator[bytes]:
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
    """Return the first ``limit`` bytes of the body, or all of it if it is shorter. Raises the same errors as
    `read_body`.
    """
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
    try:
        # As `aiter_raw`, without a generator and its frame for each open answer.
        stream = cast("httpx.AsyncByteStream", response.stream)
        async with aclosing(fair_reads(stream)) as reads:
            async for read in reads:
                for piece in inflate.feed(read) if inflate else (read,):
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    if piece:
                        yield piece
                    steps += 1
                    if inflate and steps % FAIR_READS == 0:
                        await asyncio.sleep(0)
    except TooManyCrumbs as e:
        raise BodyRefused(ErrorInfo(code="answer_chunks", kind="limit", message=str(e))) from None
    if inflate:
        inflate.end()


def _too_large(limit: int) -> BodyRefused:
    message = f"the answer has over {limit} bytes (`limits.answer_bytes`)"
    return BodyRefused(ErrorInfo(code="answer_too_large", kind="limit", message=message))


def coding_of(header: str) -> str | None:
    """Return the single coding in a `Content-Encoding` header; None if there is none. Raises BodyRefused for
    unsupported or nested codings.
    """
    codings = [name for part in header.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _CODINGS:
        encodings = ", ".join(codings)[:80]
        message = (
            f"the answer is encoded as {encodings!r}; not requested, and only one of {', '.join(_CODINGS)} is decoded"
        )
        raise BodyRefused(ErrorInfo(code="body_encoding", kind="protocol", message=message, where="content-encoding"))
    return codings[0]


class Inflate:
    """Decodes one compressed body: `feed` it everything that is read, then `end`. Both raise BodyRefused."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = zlib.decompressobj(_CODINGS[coding])
        self._head: bytes = b""
        """Too few bytes to decide what follows: a `deflate` body with or without header, or another gzip member."""
        self._read = self._given = 0

    def feed(self, data: bytes) -> Generator[bytes]:
        """Yield the content of these bytes in pieces."""
        self._read += len(data)
        if not self._given and self._coding == "deflate":
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return
            self._head = b""
            if data[0] & 0x0F != 8 or int.from_bytes(data[:2]) % 31:  # RFC 1950; some servers omit its header
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
            if not data and len(piece) < PIECE_BYTES:  # after a full piece, zlib may hold more
                return

    def end(self) -> None:
        """Check that the body was complete."""
        if self._read and not self._inflate.eof:
            raise self._undecodable("it breaks off")

    def _next_member(self, data: bytes) -> bool:
        """Start the next member of a gzip body, if there is one; anything else after the last member is padding."""
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

"""A minimal HTTP probe: the status of a page, or its beginning."""

from __future__ import annotations

import asyncio
from typing import NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 2.0
MOST_BYTES = 64 * 2**10


class ProbedPage(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    """At most `MOST_BYTES` of it."""


async def probe(url: str) -> int:
    """Return the status of a GET. Raises OSError, including TimeoutError, and ValueError if the answer is not HTTP."""
    return (await page(url)).status


async def page(url: str) -> ProbedPage:
    """Return the answer to a GET. Raises OSError, including TimeoutError, and ValueError if the answer is not HTTP."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if tls else 80), ssl=tls or None
        )
        try:
            request = f"GET {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n"
            try:
                writer.write(request.encode())
            except RuntimeError as e:  # uvloop, if the peer has reset the connection
                raise ConnectionResetError(str(e)) from e
            first, *lines = (await _head(reader)).split("\r\n")
            version, status, *_ = first.split()
            body = await _body(reader)
        finally:
            writer.close()
    if not version.startswith("HTTP/"):
        raise ValueError(f"{url}: no HTTP")
    pairs = (line.partition(":") for line in lines)
    return ProbedPage(int(status), {name.lower(): value.strip() for name, _, value in pairs}, body)


async def _head(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip("\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as e:
        raise ValueError("no HTTP") from e


async def _body(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while len(body) < MOST_BYTES and (piece := await reader.read(MOST_BYTES)):
        body += piece
    return body[:MOST_BYTES]

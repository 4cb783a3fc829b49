"""A minimal HTTP probe that returns only the status."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

TIMEOUT_S = 2.0


async def probe(url: str) -> int:
    """Return the status of a GET. Raises OSError, including TimeoutError, and ValueError if the answer is not HTTP."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if tls else 80), ssl=tls or None
        )
        try:
            writer.write(
                f"GET {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n".encode()
            )
            version, status, *_ = (await reader.readline()).split()
        finally:
            writer.close()
    if not version.startswith(b"HTTP/"):
        raise ValueError(f"{url}: no HTTP")
    return int(status)

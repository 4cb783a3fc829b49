"""A proxy before the server that breaks each connection on which a certain word comes, one way or the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

FORBIDDEN = b"what-no-proxy-lets-pass"
UPSTREAM_FAILURE = b"-ERR upstream failure\r\n"


@asynccontextmanager
async def censoring(server_url: str, *, instead: bytes = b"", word: bytes = FORBIDDEN) -> AsyncGenerator[str]:
    """The url of the proxy. ``instead``: a reply with the word is replaced by this, and the connection is kept."""
    url = urlsplit(server_url)
    links: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, instead: bytes) -> None:
        seen = b""
        while data := await reader.read(2**16):
            seen = seen[-len(word) :] + data
            if word in seen:
                if not instead:
                    return
                seen, data = b"", instead
            writer.write(data)
            await writer.drain()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_server = await asyncio.open_connection(url.hostname, url.port)
        up, down = pump(reader, to_server, b""), pump(there, writer, instead)
        ways = {asyncio.create_task(up), asyncio.create_task(down)}
        links.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (to_server, writer):
            end.transport.abort()

    proxy = await asyncio.start_server(link, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}{url.path}"
    finally:
        proxy.close()
        for each in links:
            each.cancel()
        await asyncio.gather(*links, return_exceptions=True)

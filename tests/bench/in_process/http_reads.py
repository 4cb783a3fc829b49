"""`python -m tests.bench.in_process.http_reads`: what reading a slow stream over HTTP costs, by client.

A server in another process sends each chunk in a packet of its own. Only the CPU time of the reading thread counts, and
the memory of open streams. Clients that are not installed are left out.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

import httpx
import uvloop
from httptools import HttpResponseParser

STREAMS, CHUNKS, ROUNDS, OPEN = 16, 200, 3, 1000
GAP_S = 0.002
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
Opener = Callable[[str], Awaitable[Any]]
"""Sends the request; what it returns is iterated over."""


def main() -> None:
    """Print the table."""
    print(f"{'client':24}{'µs a chunk':>12}{'KB a stream':>13}")
    for name, client in CLIENTS.items():
        try:
            figures = [_apart(client) for _ in range(ROUNDS)]
        except ModuleNotFoundError as e:
            print(f"{name:24}{e.name} is not installed")
            continue
        print(f"{name:24}{median(f[0] for f in figures):12.1f}{median(f[1] for f in figures):13.1f}", flush=True)


def _apart(client: Callable[[], Any]) -> tuple[float, float]:
    """The figures of a client in a process of its own."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn")).submit(_measured, client).result()


def _measured(client: Callable[[], Any]) -> tuple[float, float]:
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(there,))
    server.start()
    try:
        return uvloop.run(_figures(client, f"http://127.0.0.1:{here.recv()}/"))
    finally:
        server.kill()


async def _figures(client: Callable[[], Any], url: str) -> tuple[float, float]:
    async with client() as opened:
        await _read_all(opened, url, 2)
        began = time.thread_time()
        await _read_all(opened, url, STREAMS)
        spent = time.thread_time() - began
        gc.collect()
        before = _resident()
        async with AsyncExitStack() as stack:
            for _ in range(OPEN):
                pieces = aiter(await opened(f"{url}slow"))
                waiting = asyncio.ensure_future(anext(pieces))
                stack.callback(waiting.cancel)
                await asyncio.sleep(0)
            await asyncio.sleep(0.5)
            kept = _resident() - before
    return spent / STREAMS / CHUNKS * 1e6, kept / OPEN / 1024


async def _read_all(opened: Opener, url: str, streams: int) -> None:
    async def one() -> None:
        size = 0
        async for piece in await opened(url):
            size += len(piece)
        assert size == CHUNKS * len(EVENT), size

    await asyncio.gather(*(one() for _ in range(streams)))


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _serve(there: Pipe) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slow = b"/slow" in await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        if slow:
            await reader.read()
            return
        for _ in range(CHUNKS):
            await asyncio.sleep(GAP_S)
            writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
        there.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@asynccontextmanager
async def _ours() -> AsyncIterator[Opener]:
    from tokenbus_services.net.http_client import Client

    async with Client(timeout=None) as client:

        async def opened(url: str) -> Any:
            return (await client.send(client.build_request("GET", url), stream=True)).stream

        yield opened


@asynccontextmanager
async def _httpx() -> AsyncIterator[Opener]:
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def opened(url: str) -> Any:
            return (await client.send(client.build_request("GET", url), stream=True)).aiter_raw()

        yield opened


@asynccontextmanager
async def _httpx2() -> AsyncIterator[Opener]:
    import httpx2

    async with httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None)) as client:

        async def opened(url: str) -> Any:
            return (await client.send(client.build_request("GET", url), stream=True)).aiter_raw()

        yield opened


@asynccontextmanager
async def _aiohttp() -> AsyncIterator[Opener]:
    import aiohttp  # pyright: ignore[reportMissingImports]

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
    ) as session:

        async def opened(url: str) -> Any:
            return (await session.get(url)).content.iter_any()

        yield opened


@asynccontextmanager
async def _bare() -> AsyncIterator[Opener]:
    """The floor: llhttp in a protocol, and a future for each wait."""

    class Reading(asyncio.Protocol):
        def __init__(self) -> None:
            self.pieces: list[bytes] = []
            self.waiter: asyncio.Future[None] | None = None
            self.done = False
            self.on_body = self.pieces.append
            self.parser = HttpResponseParser(self)

        def on_message_complete(self) -> None:
            self.done = True

        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)
            if self.waiter and not self.waiter.done():
                self.waiter.set_result(None)

        def __aiter__(self) -> Reading:
            return self

        async def __anext__(self) -> bytes:
            while not self.pieces:
                if self.done:
                    raise StopAsyncIteration
                self.waiter = asyncio.get_running_loop().create_future()
                await self.waiter
            data = b"".join(self.pieces)
            self.pieces.clear()
            return data

    async def opened(url: str) -> Any:
        at = httpx.URL(url)
        assert at.port
        transport, reading = await asyncio.get_running_loop().create_connection(Reading, at.host, at.port)
        transport.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % at.raw_path)
        return reading

    yield opened


CLIENTS: dict[str, Callable[[], Any]] = {
    "llhttp in a protocol": _bare,
    "tokenbus_services.net": _ours,
    "aiohttp": _aiohttp,
    "httpx2": _httpx2,
    "httpx": _httpx,
}

if __name__ == "__main__":
    sys.exit(main())

"""A blob store on each backend, its contents laid bare, and a real server before it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from uuid import uuid4

import httpx
import obstore
import pytest
import uvicorn
from obstore.store import LocalStore, MemoryStore, S3Store

from tests.waiting import eventually_sync
from tokenbus_services.blobs.http import AsgiApp, BlobRoutes, Receive, Scope, Send
from tokenbus_services.blobs.store import BlobStore
from tokenbus_services.process.embedded_server import free_port

MAX_BYTES = 8 * 2**20


class MemoryBlobs:
    """A `BlobStore` and its storage."""

    def __init__(self, objects: LocalStore | MemoryStore | S3Store, root: Path | None) -> None:
        self.objects = objects
        self.root = root
        self.now = 0.0
        """Added to the store's clock."""
        self.store = BlobStore(
            objects, max_bytes=MAX_BYTES, ttl_s=100.0, lease_s=1000.0, longest_lease_s=4000.0, clock=self.clock
        )

    def clock(self) -> float:
        return time.time() + self.now

    def everything(self) -> list[str]:
        """All objects, and on a disk all files: half-written ones too, which the object store does not list."""
        if self.root is not None:
            return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        return sorted(entry["path"] for entry in obstore.list(self.objects).collect())


@pytest.fixture(scope="session")
def s3_endpoint() -> Generator[str]:
    """A process that speaks S3 (moto's), with the bucket `blobs`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually_sync(lambda: _made(url))
            yield url
        finally:
            process.terminate()


def _made(url: str) -> bool:
    try:
        return httpx.put(f"{url}/blobs").status_code == 200
    except httpx.TransportError:
        return False


def s3_store(endpoint: str) -> S3Store:
    """A place of its own in the bucket."""
    return S3Store(
        "blobs",
        prefix=uuid4().hex,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="anyone",
        secret_access_key="anything",
        client_options={"allow_http": True},
    )


@pytest.fixture(params=["local", "memory", "s3"])
def blob_store(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryBlobs:
    if request.param == "memory":
        return MemoryBlobs(MemoryStore(), None)
    if request.param == "s3":
        return MemoryBlobs(s3_store(request.getfixturevalue("s3_endpoint")), None)
    root = tmp_path / "blobs"
    return MemoryBlobs(LocalStore(root, mkdir=True, automatic_cleanup=True), root)


@pytest.fixture
def local_store(tmp_path: Path) -> MemoryBlobs:
    root = tmp_path / "blobs"
    return MemoryBlobs(LocalStore(root, mkdir=True, automatic_cleanup=True), root)


class Served:
    """An ASGI app behind uvicorn on a loopback port."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._begun = 0
        config = uvicorn.Config(self._counted, port=0, interface="asgi3", lifespan="off", log_config=None)  # type: ignore[arg-type]
        self._server = uvicorn.Server(config)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._begun += 1
        await self._app(scope, receive, send)

    # uvicorn's own main loop and shutdown wait in steps of a tenth of a second: too slow for each test.

    async def start(self) -> None:
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup()
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        for server in self._server.servers:
            server.close()
        state = self._server.server_state
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not state.connections and not state.tasks)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of the requests that are being handled."""
        return [*self._server.server_state.tasks]

    async def begun(self) -> None:
        """Returns when a request has reached the app."""
        await until(lambda: self._begun > 0)

    async def idle(self) -> None:
        """Returns when a request has reached the app and none is being handled."""
        await until(lambda: self._begun > 0 and not self._server.server_state.tasks)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for is uvicorn's and sets no event
        await asyncio.sleep(0.002)


Serve = Callable[[AsgiApp], Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server for an app; all are stopped after the test."""
    started: list[Served] = []

    async def start(app: AsgiApp) -> Served:
        server = Served(app)
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
async def service(blob_store: MemoryBlobs, serve: Serve) -> Served:
    """The blob routes over the blob store of this test."""
    return await serve(BlobRoutes(blob_store.store, idle_s=5.0))

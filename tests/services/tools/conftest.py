"""An executor over the tools of a test, with a blob store in memory that fails on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping

import pytest

from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.errors import BlobError, BlobNotFound
from tokenbus_services.settings import LimitSettings, PythonTool, ToolSettings
from tokenbus_services.tools.executor import ToolCall, ToolExecutor, ToolRegistry

SAMPLES = "tests.services.tools.sample_tools"


class MemoryBlobs:
    """A blob store that holds contents in a dict."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.media_types: dict[str, str] = {}
        self.failure: BlobError | None = None
        """Raised by each store, after it has read the content."""
        self.closed = False

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        whole = content if isinstance(content, bytes) else b"".join([chunk async for chunk in content])
        if self.failure:
            raise self.failure
        blob_id = blob_id_of(whole)
        self.contents[blob_id] = whole
        self.media_types[blob_id] = media_type
        return BlobRef(blob_id=blob_id, media_type=media_type, size=len(whole))

    async def load(self, blob_id: str) -> bytes:
        if blob_id not in self.contents:
            raise BlobNotFound(blob_id)
        return self.contents[blob_id]

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


MakeExecutor = Callable[..., ToolExecutor]


@pytest.fixture
async def make_executor(blobs: MemoryBlobs) -> AsyncIterator[MakeExecutor]:
    """Makes executors of tools; closes them after the test."""
    made: list[ToolExecutor] = []

    def make(
        tools: Mapping[str, ToolSettings],
        *,
        limit: int = 1000,
        env: Mapping[str, str] | None = None,
    ) -> ToolExecutor:
        registry = ToolRegistry(tools, env=env or {})
        executor = ToolExecutor(registry, LimitSettings(tool_result_bytes=limit), blobs)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        await executor.close()


@pytest.fixture
def run(make_executor: MakeExecutor) -> MakeExecutor:
    """An executor with one Python tool, of this name in the samples."""

    def make(name: str, **settings: object) -> ToolExecutor:
        options = {key: settings.pop(key) for key in ("limit", "env") if key in settings}
        return make_executor({name: PythonTool(call=f"{SAMPLES}:{name}", **settings)}, **options)  # type: ignore[arg-type]

    return make


def call(name: str, arguments: str = "{}", **changes: object) -> ToolCall:
    fields = {"run": "r1", "turn": 2, "block": 3, "tool_id": "call_1", "name": name, "arguments": arguments}
    return ToolCall(**{**fields, **changes})  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for may be in a thread
        await asyncio.sleep(0.002)

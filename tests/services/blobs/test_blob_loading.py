"""Which store a deployment uses: the blob service, or one that its settings name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from tokenbus.blobs import BlobLoader, BlobStreams
from tokenbus.bus import process_clock
from tokenbus.bus.process_clock import ProcessClock
from tokenbus.errors import BlobUnavailable, SettingsError
from tokenbus_services.blobs import client
from tokenbus_services.blobs.client import HttpBlobs, loader_of
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.settings import BlobSettings

HERE = __name__


class Own:
    """All that a loader must have."""

    async def store(self, content: object, media_type: str) -> None: ...

    async def load(self, blob_id: str) -> None: ...

    async def aclose(self) -> None: ...


def broken() -> Own:
    raise LookupError("no bucket")


def half() -> object:
    return object()


number = 3


async def test_it_is_the_blob_service_unless_the_settings_name_another() -> None:
    loader = loader_of(BlobSettings(), {})
    assert isinstance(loader, HttpBlobs)
    await loader.aclose()
    own: Any = loader_of(BlobSettings(loader=f"{HERE}:Own"), {})
    assert isinstance(own.loader, Own)
    assert not isinstance(own, BlobStreams)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no.such.module:create", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:nothing", "cannot be imported: AttributeError"),
        (f"{HERE}:number", "is not callable"),
        (f"{HERE}:broken", "LookupError: no bucket"),
        (f"{HERE}:half", "without store, load, aclose"),
    ],
)
def test_a_path_that_leads_to_no_loader_is_an_error_of_the_settings(path: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as e:
        loader_of(BlobSettings(loader=path), {})
    assert e.value.where == "blobs.loader"


@pytest.mark.parametrize("path", ["module", "module:", ":create", "a b:c", "a:b\n"])
def test_what_is_no_path_is_refused_by_the_settings(path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="loader"):
        msgspec.convert({"loader": path}, BlobSettings)


BLOB = "sha256:" + 64 * "0"


class Hanging:
    """A store that takes each call and never answers, and gives the first piece of a blob."""

    async def _never(self, *_: object) -> Any:
        await asyncio.Event().wait()

    store = load = head = lease = lease_for = check = delete = aclose = _never

    async def chunks(self, blob_id: str) -> AsyncIterator[bytes]:
        yield b"first"
        await self._never()


class Taking(Hanging):
    """Takes all of what it is given, and then hangs."""

    async def store(self, content: bytes | AsyncIterator[bytes], media_type: str) -> None:
        if not isinstance(content, bytes):
            self.taken = b"".join([piece async for piece in content])
        await self._never()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(client, "WAIT_S", 0.2)
    monkeypatch.setattr(client, "_CLOSE_S", 0.2)
    return loader_of(BlobSettings(loader=f"{HERE}:Hanging"), {})


CALLS: dict[str, Callable[[Any], Awaitable[object]]] = {
    "store": lambda loader: loader.store(b"content", "image/png"),
    "load": lambda loader: loader.load(BLOB),
    "head": lambda loader: loader.head(BLOB),
    "lease": lambda loader: loader.lease(BLOB),
    "lease_for": lambda loader: loader.lease_for(BLOB, 3.0),
    "check": lambda loader: loader.check(BLOB),
    "delete": lambda loader: loader.delete(BLOB),
    "find": lambda loader: RecentBlobs(loader, 0).find(BLOB),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_store_of_ones_own_that_hangs_is_unavailable(hanging: BlobLoader, call: str) -> None:
    with pytest.raises(BlobUnavailable, match="waited for over") as e:
        await CALLS[call](hanging)
    assert e.value.retryable


async def test_a_store_of_ones_own_that_hangs_in_the_middle_of_a_blob_is_unavailable(hanging: BlobStreams) -> None:
    assert isinstance(hanging, BlobStreams)
    async with aclosing(hanging.chunks(BLOB)) as chunks:  # pyright: ignore[reportArgumentType]
        assert await anext(chunks) == b"first"
        with pytest.raises(BlobUnavailable):
            await anext(chunks)


async def test_the_time_of_a_source_does_not_count_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WAIT_S", 0.1)
    own: Any = loader_of(BlobSettings(loader=f"{HERE}:Taking"), {})
    passed_s = 0.0
    before = process_clock.install(ProcessClock(lambda: time.monotonic() + passed_s))

    async def slow() -> AsyncIterator[bytes]:
        nonlocal passed_s
        for piece in (b"a", b"b", b"c"):
            passed_s += 0.5
            yield piece

    try:
        with pytest.raises(BlobUnavailable):
            await own.store(slow(), "image/png")
    finally:
        process_clock.install(before)
    assert own.loader.taken == b"abc"


async def test_a_store_of_ones_own_that_hangs_as_it_is_closed_keeps_no_worker(hanging: BlobLoader) -> None:
    await hanging.aclose()

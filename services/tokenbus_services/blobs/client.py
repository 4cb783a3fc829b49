"""HTTP client of the blob service for other services. Content is verified on arrival."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar

import httpx
import structlog

from tokenbus import errors
from tokenbus.blob_wire import DEPLOYMENT_ENV, DEPLOYMENT_HEADER, check_deployment
from tokenbus.blobs import BlobLoader, BlobRef
from tokenbus.bus import process_clock
from tokenbus.client.archive import Archive
from tokenbus.client.blobs import BlobAnswer, Blobs
from tokenbus.secret_env import Secret
from tokenbus_services.blobs.auth import secret_of
from tokenbus_services.net.http_client import Client
from tokenbus_services.redaction.redactor import LEARNED
from tokenbus_services.settings import BlobSettings
from tokenbus_services.settings.file import add_settings_directory_to_path
from tokenbus_services.telemetry import worked_for

__all__ = ["BlobLoader", "HttpBlobs"]

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
WAIT_S = 60.0
"""How long one call waits for the service in all, in addition to a second for each `_BYTES_PER_S` transferred. Time in
which the caller provides or takes content does not count.
"""
_BYTES_PER_S = 2**20

T = TypeVar("T")


class HttpBlobs(Blobs):
    """The blob service at ``base_url``, over as many connections as it has calls; close it with ``aclose`` or
    ``async with``.

    A call is tried once: every error whose ``retryable`` is true may be tried again as it is.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_bytes: int = BlobSettings().max_bytes,
        token: str | Secret = "",
        deployment: str = "",
    ) -> None:
        """``deployment``: the id with which the service must answer; empty: any."""
        super().__init__(base_url, token=token, deployment=deployment)
        self._max_bytes = max_bytes
        self._http = Client(base_url=base_url, timeout=_TIMEOUT)

    @classmethod
    def from_settings(cls, settings: BlobSettings, env: Mapping[str, str] = os.environ) -> HttpBlobs:
        """A client of the deployment's blob service. Raises SettingsError for an invalid token."""
        return cls(
            settings.address,
            max_bytes=settings.max_bytes,
            token=secret_of(settings.token_env, env),
            deployment=env.get(DEPLOYMENT_ENV, ""),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def lease_for(self, blob_id: str, seconds: float) -> None:
        """Extend the blob's life to this number of seconds from now, if the store allows it. Raises as `lease`."""
        await self._ask_for("POST", blob_id, f"/lease?seconds={seconds:.0f}")

    async def delete(self, blob_id: str) -> None:
        """Remove the content for good. Raises BlobNotFound, BlobUnavailable."""
        await self._ask_for("DELETE", blob_id)

    @property
    def _authorization(self) -> dict[str, str]:
        headers = super()._authorization
        LEARNED.learn([value.removeprefix("Bearer ") for value in headers.values()])
        traceparent = worked_for()
        return {**headers, "traceparent": traceparent} if traceparent else headers

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | AsyncIterable[bytes] | None = None,
    ) -> AsyncGenerator[BlobAnswer]:
        headers = {"Accept-Encoding": "identity", **self._authorization, **(headers or {})}
        request = self._http.build_request(method, path, content=body, headers=headers)
        # The pace of an iterator is its source's: who gives one has a bound of its own.
        wait_s = WAIT_S + len(body or b"") / _BYTES_PER_S if body is None or isinstance(body, bytes) else None
        try:
            async with process_clock.timeout(wait_s):
                response = await self._http.send(request, stream=True)
            try:
                check_deployment(self._deployment, response.headers.get(DEPLOYMENT_HEADER), self._url)
                pieces = _in_time(response.aiter_raw())
                yield BlobAnswer(response.status_code, response.headers.get, lambda: anext(pieces, b""))
            finally:
                await response.aclose()
        except httpx.HTTPError as e:
            raise errors.BlobUnavailable(self._url, f"{type(e).__name__} {e}".strip()) from e
        except TimeoutError as e:
            raise errors.BlobUnavailable(self._url, f"it was waited for over {WAIT_S:g} s") from e


async def _in_time(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks, as they arrive. Raises TimeoutError if the store was waited for too long in all (`WAIT_S`)."""
    left_s = WAIT_S
    while True:
        began = process_clock.now()
        try:
            async with process_clock.timeout(left_s):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        left_s += len(chunk) / _BYTES_PER_S - (process_clock.now() - began)
        yield chunk


# The deployment's blob loader: the blob service's client, or the one named by the settings.

_METHODS = ("store", "load", "aclose")
_MORE_METHODS = ("head", "lease", "lease_for", "check", "delete")
"""What the services use if a loader has it: the methods of `BlobStreams` but for ``chunks``, and of `HttpBlobs`."""
_CLOSE_S = 5.0


class _BoundedLoader:
    """A loader of the deployment's own. A call waits for it no longer than for the blob service (`WAIT_S`): a store
    that hangs is unavailable. It has those of the optional methods that the loader has.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        for name in _MORE_METHODS:
            if hasattr(loader, name):
                setattr(self, name, partial(_waited, getattr(loader, name)))
        if hasattr(loader, "chunks"):
            self.chunks = self._chunks

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        sent_s = len(content) / _BYTES_PER_S if isinstance(content, bytes) else 0.0
        with _late_is_unavailable():
            async with process_clock.timeout(WAIT_S + sent_s) as limit:
                given = content if isinstance(content, bytes) else _given(content, limit)
                return await self.loader.store(given, media_type)

    async def load(self, blob_id: str) -> bytes:
        return await _waited(self.loader.load, blob_id)

    async def aclose(self) -> None:
        try:
            async with process_clock.timeout(_CLOSE_S):
                await self.loader.aclose()
        except TimeoutError:
            log.warning("blob_loader_not_closed", waited_s=_CLOSE_S)

    async def _chunks(self, blob_id: str) -> AsyncIterator[bytes]:
        with _late_is_unavailable():
            async with aclosing(self.loader.chunks(blob_id)) as chunks:
                async for chunk in _in_time(chunks):
                    yield chunk


async def _waited(call: Callable[..., Awaitable[T]], *args: Any) -> T:
    with _late_is_unavailable():
        async with process_clock.timeout(WAIT_S):
            return await call(*args)


@contextmanager
def _late_is_unavailable() -> Generator[None]:
    try:
        yield
    except TimeoutError as e:
        raise errors.BlobUnavailable("blobs.loader", str(e) or f"it was waited for over {WAIT_S:g} s") from e


async def _given(content: AsyncIterable[bytes], limit: process_clock.Timeout) -> AsyncIterator[bytes]:
    """The content; time in which its source provides it does not count for the limit."""
    until, pieces = process_clock.now() + WAIT_S, aiter(content)
    while True:
        limit.reschedule(None)
        began, piece = process_clock.now(), b""
        try:
            piece = await anext(pieces)
        except StopAsyncIteration:
            return
        finally:
            until += process_clock.now() - began + len(piece) / _BYTES_PER_S
            limit.reschedule(until)
        yield piece


def archive_of(settings: BlobSettings, env: Mapping[str, str] = os.environ) -> Archive:
    """A client of the deployment's archive. Raises SettingsError for an invalid token."""
    token = secret_of(settings.token_env, env)
    return Archive(settings.address, token=token, deployment=env.get(DEPLOYMENT_ENV, ""))


def loader_of(settings: BlobSettings, env: Mapping[str, str] = os.environ) -> BlobLoader:
    """Create the loader; the caller must close it. Its module may be in the directory of the settings file.

    Raises SettingsError if `blobs.loader` is invalid.
    """
    if settings.loader is None:
        return HttpBlobs.from_settings(settings, env)
    add_settings_directory_to_path(env)
    factory = _factory(settings.loader)
    try:
        made = factory()
    except Exception as e:
        raise _refused(f"{settings.loader!r} raised {type(e).__name__}: {e}") from e
    if missing := [name for name in _METHODS if not callable(getattr(made, name, None))]:
        raise _refused(f"{settings.loader!r} returned a {type(made).__name__} without {', '.join(missing)}")
    return _BoundedLoader(made)


def check_loader(path: str, env: Mapping[str, str] = os.environ) -> None:
    """Import the factory at this path, and do not call it. Raises SettingsError if that is not possible."""
    add_settings_directory_to_path(env)
    _factory(path)


def _factory(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except Exception as e:
        raise _refused(f"{path!r} cannot be imported: {type(e).__name__}: {e}") from e
    if not callable(found):
        raise _refused(f"{path!r} is not callable: it is of type {type(found).__name__}")
    return found


def _refused(problem: str) -> errors.SettingsError:
    return errors.SettingsError("settings", "blobs.loader", problem)


TRIES = 3
PAUSE_S = 0.1
"""Pause between two tries."""
COOL_DOWN_S = 5.0
"""Cool-down after a failure, during which the store is not tried."""


class StoreRetry(Generic[T]):
    """Retries and cool-down for one store, shared by all its users."""

    def __init__(self, store: Callable[[bytes | AsyncIterable[bytes], str], Awaitable[T]]) -> None:
        """``store`` may raise anything: exceptions other than BlobError count as an unavailable store."""
        self._store = store
        self._cooling_down_until = 0.0

    async def put(self, content: Callable[[], bytes | AsyncIterable[bytes]], media_type: str, *, until: float) -> T:
        """Store content and return the store's answer. ``content`` is called for each try; ``until`` is a time
        of the process's clock.

        Raises BlobError; BlobUnavailable also during the cool-down and on timeout.
        """
        clock = process_clock.now
        if clock() < self._cooling_down_until:
            raise errors.BlobUnavailable("blobs", "the blob store was unavailable a moment ago")
        began = clock()
        try:
            async with process_clock.timeout(until - began):
                return await self._store_with_retries(content, media_type)
        except TimeoutError:
            problem: errors.BlobError = errors.BlobUnavailable("blobs", f"not stored within {clock() - began:.0f} s")
        except errors.BlobError as e:
            if not e.retryable:
                raise
            problem = e
        except Exception as e:
            problem = errors.BlobUnavailable("blobs", f"{type(e).__name__}: {e}")
        self._cooling_down_until = clock() + COOL_DOWN_S
        raise problem

    async def _store_with_retries(self, content: Callable[[], bytes | AsyncIterable[bytes]], media_type: str) -> T:
        for _ in range(TRIES - 1):
            try:
                return await self._store(content(), media_type)
            except errors.BlobError as e:
                if not e.retryable:
                    raise
            await asyncio.sleep(PAUSE_S)
        return await self._store(content(), media_type)

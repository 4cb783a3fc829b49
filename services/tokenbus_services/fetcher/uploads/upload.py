"""One upload of a blob to a provider's file API: streams it from the store and handles every way it can end."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import httpx
import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus import process_clock
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import IDLE_S, beat
from tokenbus.bus.server.server import Server
from tokenbus.errors import Malformed, RequestInvalid
from tokenbus.events.error_info import ErrorInfo
from tokenbus.providers.file_api import FileAnswer, FileApi, FileCall, FileToUpload, ProviderFile
from tokenbus.providers.response.error_mapping import http_failure, wire_failure
from tokenbus_services.endpoints.endpoint import MAX_REQUEST_S, AuthUnavailable, Endpoint, KeyMissing, KeyUnusable
from tokenbus_services.endpoints.response_body import BodyRefused, beginning, described
from tokenbus_services.media.blob_cache import Found
from tokenbus_services.media.locate import Embedded, MediaBody, PlaceholderMarks

MAX_ANSWER_BYTES = 64 * 2**10
LEAST_BYTES_PER_S = 256 * 2**10
"""A slower upload is given up. Each piece may stall for long, so without a rate a large file could drip for days."""

AUTH_UNAVAILABLE = "auth_unavailable"
"""Error code if a provider's `auth` raised."""
TOO_SLOW = "upload_too_slow"
"""Error code of an upload below `LEAST_BYTES_PER_S`; it is not tried again at once."""


class UploadFailed(Exception):
    """An upload failed; ``error`` is the error that the provider call would have ended with."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error

    def at(self, where: str) -> UploadFailed:
        """Return the same error, for media at this place of the conversation."""
        return UploadFailed(msgspec.structs.replace(self.error, message=f"{where}: {self.error.message}", where=where))


async def upload(
    endpoint: Endpoint, api: FileApi, file: FileToUpload, content: Embedded, *, moves: Callable[[float], None]
) -> ProviderFile:
    """Upload the blob as a file. Holds at most one piece of its content in memory. ``moves``: called with the longest
    time that the next step may take in silence.

    Raises UploadFailed, and MediaFailed if the blob breaks off.
    """
    marks = PlaceholderMarks()
    mark = b64decode(marks.base64(0))
    steps = api.upload(file, mark, endpoint.base_path)
    try:
        call = next(steps)
        while True:
            timeouts = endpoint.settings
            moves(call.pause_s + timeouts.connect_timeout_s + timeouts.first_event_timeout_s)
            await asyncio.sleep(call.pause_s)
            pieces = [piece if isinstance(piece, bytes) else content for piece in marks.split(call.body)]
            try:
                call = steps.send(await _answer(endpoint, call, MediaBody(pieces)))
            except StopIteration as e:
                return e.value
    except Malformed as e:
        raise UploadFailed(wire_failure(e)) from e


async def _answer(endpoint: Endpoint, call: FileCall, body: MediaBody) -> FileAnswer:
    settings = endpoint.settings
    allowed_s = settings.connect_timeout_s + settings.first_event_timeout_s + MAX_REQUEST_S
    allowed_s += body.size / LEAST_BYTES_PER_S
    limit = process_clock.timeout(allowed_s)
    try:
        async with limit:
            return await _answered(endpoint, call, body)
    except TimeoutError as e:
        if not limit.expired():
            raise
        message = f"the upload of {body.size} bytes to {endpoint.name} took longer than {allowed_s:.0f} s"
        raise UploadFailed(ErrorInfo(code=TOO_SLOW, kind="timeout", message=message, retryable=True)) from e


async def _answered(endpoint: Endpoint, call: FileCall, body: MediaBody) -> FileAnswer:
    try:
        request = endpoint.file_request(call, body)
        response = await endpoint.send(request, authorised="://" in call.path)
    except (KeyMissing, KeyUnusable) as e:
        raise UploadFailed(ErrorInfo(code="key_missing", kind="auth", message=str(e), where=e.variable)) from e
    except AuthUnavailable as e:
        raise UploadFailed(ErrorInfo(code=AUTH_UNAVAILABLE, kind="auth", message=str(e), retryable=True)) from e
    except RequestInvalid as e:
        raise UploadFailed(ErrorInfo(code="upload_refused", kind="protocol", message=str(e))) from e
    except (httpx.TransportError, httpx.InvalidURL) as e:
        raise UploadFailed(_network(endpoint, e)) from e
    finally:
        await body.aclose()
    try:
        content = await beginning(response, MAX_ANSWER_BYTES)
    except BodyRefused as e:
        raise UploadFailed(e.error) from e
    except httpx.TransportError as e:
        raise UploadFailed(_network(endpoint, e)) from e
    finally:
        await response.aclose()
    headers: Mapping[str, str] = response.headers
    if response.status_code >= 300:
        redacted = {name: endpoint.redact(value) for name, value in headers.items()}
        raise UploadFailed(http_failure(response.status_code, endpoint.redact.data(content), redacted))
    return FileAnswer(headers={name.lower(): value for name, value in headers.items()}, body=content)


def _network(endpoint: Endpoint, error: Exception) -> ErrorInfo:
    return ErrorInfo(
        code="network",
        kind="network",
        message=endpoint.redact(f"the upload to {endpoint.name} failed: {described(error)}"),
        retryable=True,
    )


# Each row is its own key, named by a digest of everything the file depends on; it expires before the file does. A blob
# that was sent without becoming a file leaves an empty row. All of this can be rebuilt: if the server is unavailable or
# lost rows, the worst cost is another upload.


SENT = ""
"""Row value: the blob was sent, but not as a file."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class UploadedFiles:
    """The registry. Its rows are named by digests (`Keys.file`)."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def look(self, names: Iterable[str]) -> dict[str, str] | None:
        """Return the file ids of the names that have a row (`SENT` for an empty one); None if the server is
        unavailable.
        """
        distinct = list(dict.fromkeys(names))
        try:
            # One command each: in a Cluster the keys may be on any node.
            values = await asyncio.gather(*(self._server.client.get(self._keys.file(name)) for name in distinct))
        except (RedisError, OSError) as e:
            log.warning("upload_registry_not_read", error=str(e))
            return None
        return {name: value.decode() for name, value in zip(distinct, values, strict=True) if value is not None}

    async def sent(self, names: Iterable[str], keep_s: float) -> None:
        """Record that these were sent, but not as files. Existing rows stay."""
        await self._set(names, SENT, keep_s, only_new=True)

    async def put(self, name: str, file_id: str, keep_s: float) -> None:
        """Record a file. If two fetchers uploaded at once, the later one's file is used."""
        await self._set([name], file_id, keep_s)

    async def drop(self, names: Iterable[str], keep_s: float) -> None:
        """Forget files that are gone. If another fetcher records a new one at this moment, it is uploaded once more."""
        await self._set(names, SENT, keep_s)

    async def _set(self, names: Iterable[str], value: str, keep_s: float, *, only_new: bool = False) -> None:
        ms = max(1, round(keep_s * 1000))
        try:
            await asyncio.gather(
                *(self._server.client.set(self._keys.file(name), value, px=ms, nx=only_new) for name in set(names))
            )
        except (RedisError, OSError) as e:
            log.warning("upload_registry_not_written", error=str(e))


# An upload in progress, and how its waiting turns know that it progresses.
#
# Turns that need the same file share one upload, which runs in its own task. While the upload progresses, so do they.
# If it makes no progress for longer than its step may take, their work counts as stuck, so a stalled upload delays none
# of them forever.

PIECE_S = 60.0
"""How long the next piece of a blob may take: from its store, or to the provider."""


class Flight:
    """An upload that turns wait for; cancelled when the last of them is."""

    def __init__(self) -> None:
        self.waiting = 0
        self.task: asyncio.Task[ProviderFile] | None = None
        self._quiet_until = 0.0
        """Until then it may be silent, in the event loop's time."""

    def start(self, work: Coroutine[Any, Any, ProviderFile]) -> None:
        self.moves(PIECE_S)
        self.task = asyncio.create_task(work, name="upload")

    def moves(self, quiet_s: float) -> None:
        """Record progress. The next step may take this long."""
        self._quiet_until = max(self._quiet_until, asyncio.get_running_loop().time() + quiet_s)

    async def landed(self) -> ProviderFile:
        """Wait until the upload ends, with a beat while it progresses. Raises what the upload raised."""
        assert self.task
        loop = asyncio.get_running_loop()
        while not (await asyncio.wait({self.task}, timeout=IDLE_S))[0]:
            if loop.time() < self._quiet_until:
                beat()
        return self.task.result()

    def watched(self, found: Found) -> Found:
        """The same blob; each piece that is read of it is progress."""
        return msgspec.structs.replace(found, pieces=_counted(found.pieces, lambda: self.moves(PIECE_S)))


def _counted(
    pieces: Callable[[], AsyncGenerator[bytes]], moved: Callable[[], None]
) -> Callable[[], AsyncGenerator[bytes]]:
    async def counted() -> AsyncGenerator[bytes]:
        async with aclosing(pieces()) as read:
            async for piece in read:
                moved()
                yield piece

    return counted

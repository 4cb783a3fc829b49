"""Decides which media of a turn are uploaded as provider files, so that their bytes are not sent with each request.

A blob is worth an upload if it is large and sent repeatedly: the run has tools to call or has called some, or any
fetcher has sent the blob before. It is then uploaded once, as bytes instead of base64, and named from then on. A blob
that does not fit into a request otherwise is uploaded too.

A failed upload is harmless: it is retried once if a call would be, then the media are sent inside the request. Only if
they do not fit there does the attempt end with the upload's error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus.blobs import plain_media_type
from tokenbus.events.error_info import ErrorClass, ErrorInfo
from tokenbus.events.requests import BlobSource, FileSource, ImagePart
from tokenbus.providers.file_api import FileApi, FileToUpload, Kind, ProviderFile
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.uploads.upload import SENT, TOO_SLOW, Flight, UploadedFiles, UploadFailed, upload
from tokenbus_services.media.blob_cache import Found
from tokenbus_services.media.locate import Embedded, Media, MediaFailed, base64_size
from tokenbus_services.settings import UploadSettings

AT_ONCE = 4
"""Concurrent uploads per turn."""
SECOND_TRY_S, LONGEST_WAIT_S = 0.25, 2.0
"""Pause before the second try, and the longest pause a provider may ask for."""
REST_S, LONG_REST_S = 30.0, 600.0
"""How long uploads are suspended after a failure: a temporary one, and a permanent one."""
MARGIN_S = 3_600.0
"""How long the provider keeps a file beyond its use here, so that no call finds it gone half-way."""
MOST_RESTING = 1_000

_OF_THE_FILE: tuple[ErrorClass, ...] = ("invalid_request", "content_filter", "protocol")
"""Error classes that do not affect other uploads."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class UploadMetrics:
    """Blobs uploaded as provider files."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._made = Counter("tokenbus_uploads", "Blobs uploaded to a provider's file store.", registry=registry)
        self._bytes = Counter("tokenbus_upload_bytes", "Their bytes.", registry=registry)
        self.failed = Counter(
            "tokenbus_uploads_failed", "Uploads that failed; their media went inside the request.", registry=registry
        )
        self.lost = Counter(
            "tokenbus_files_lost", "Files that the provider no longer had when a request named them.", registry=registry
        )

    def made(self, size: int) -> None:
        """Count one upload of ``size`` bytes."""
        self._made.inc()
        self._bytes.inc(size)


class Sendable(msgspec.Struct, frozen=True, kw_only=True):
    """A blob of this turn that may become a file."""

    where: str
    kind: Kind
    media_type: str
    blob_id: str
    found: Found
    name: str
    """Name of its row: a digest of everything the file depends on."""


class Uploads:
    def __init__(self, files: UploadedFiles, metrics: UploadMetrics) -> None:
        self._files = files
        self._metrics = metrics
        self._flights: dict[str, Flight] = {}
        self._resting: dict[str, tuple[float, ErrorInfo]] = {}
        """Endpoints and rows with suspended uploads: until when, and the error that caused it."""

    async def name(
        self,
        endpoint: Endpoint,
        media: Mapping[str, tuple[Media, Found]],
        *,
        room: int | None,
        repeats: bool,
        own: Collection[str],
        lost: Collection[str],
    ) -> dict[str, FileSource]:
        """Return the file sources that replace these blobs, by place; blobs sent inside the request are not listed.

        - ``room``: bytes left for base64 in the request (None: unlimited).
        - ``repeats``: whether the run will probably send them again.
        - ``own``: places of media that the model made, which are sent back unchanged.
        - ``lost``: files that the provider said it does not have. Then nothing that fits inside the request is named,
          because it may be gone too.

        Raises MediaFailed, and UploadFailed if a blob could not be uploaded and does not fit inside the request.
        """
        settings, api = endpoint.settings.uploads, endpoint.api.files
        if settings is None or api is None:
            return {}
        least = 0 if room is not None and _inside(media, ()) > room else settings.min_bytes
        sendable = [
            one
            for where, (part, found) in media.items()
            if where not in own and found.size >= least and (one := _sendable(endpoint, api, where, part, found))
        ]
        known = await self._files.look([one.name for one in sendable]) if sendable else None
        if known is None:
            return {}
        if gone := [name for name, file_id in known.items() if file_id in lost]:
            log.info("files_lost", provider=endpoint.name, files=len(gone))
            self._metrics.lost.inc(len(gone))
            await self._files.drop(gone, settings.keep_s)
            known |= dict.fromkeys(gone, SENT)
        worth = [
            one
            for one in sendable
            if not lost and one.found.size >= settings.min_bytes and (repeats or one.name in known)
        ]
        worth += _too_much(media, {one.where for one in worth}, sendable, room)
        named, failures = await self._uploaded(endpoint, api, settings, worth, known)
        inside = [one.name for one in sendable if one.where not in named and one.name not in known]
        await self._files.sent(inside, settings.keep_s)
        if failures and room is not None and _inside(media, named) > room:
            raise failures[0]
        return named

    async def _uploaded(
        self, endpoint: Endpoint, api: FileApi, settings: UploadSettings, worth: list[Sendable], known: dict[str, str]
    ) -> tuple[dict[str, FileSource], list[UploadFailed]]:
        at_once = asyncio.Semaphore(AT_ONCE)

        async def file_of(one: Sendable) -> str | UploadFailed | MediaFailed:
            if file_id := known.get(one.name):
                return file_id
            async with at_once:
                try:
                    return (await self._shared(one.name, partial(self._upload, endpoint, api, settings, one))).file_id
                except UploadFailed as e:
                    return e.at(one.where)
                except MediaFailed as e:
                    return e

        async with asyncio.TaskGroup() as tasks:
            making = {one.where: (one, tasks.create_task(file_of(one))) for one in worth}
        named: dict[str, FileSource] = {}
        failures: list[UploadFailed] = []
        for where, (one, task) in making.items():
            made = task.result()
            if isinstance(made, MediaFailed):
                raise made
            if isinstance(made, UploadFailed):
                failures.append(made)
            else:
                named[where] = FileSource(file_id=made, media_type=one.media_type)
        return named, failures

    async def _shared(self, name: str, make: Callable[[Flight], Coroutine[Any, Any, ProviderFile]]) -> ProviderFile:
        """Return the file of this row; uploaded once for all turns here that want it now."""
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = Flight()
            flight.start(make(flight))
        flight.waiting += 1
        try:
            return await flight.landed()
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                if self._flights.get(name) is flight:
                    del self._flights[name]
                if flight.task and not flight.task.done():
                    flight.task.cancel()
                    await asyncio.gather(flight.task, return_exceptions=True)

    async def _upload(
        self, endpoint: Endpoint, api: FileApi, settings: UploadSettings, one: Sendable, flight: Flight
    ) -> ProviderFile:
        """Upload the blob and register the file for all fetchers. Raises UploadFailed, and MediaFailed if the blob
        breaks off.
        """
        self._rested(endpoint.account)
        self._rested(one.name)
        file = FileToUpload(
            kind=one.kind, media_type=one.media_type, size=one.found.size, keep_s=settings.keep_s + MARGIN_S
        )
        content = Embedded(one.where, one.blob_id, flight.watched(one.found), raw=True)
        try:
            made = await self._tried(lambda: upload(endpoint, api, file, content, moves=flight.moves))
        except UploadFailed as e:
            self._rest(one.name if e.error.kind in _OF_THE_FILE else endpoint.account, e.error)
            self._metrics.failed.inc()
            log.warning("upload_failed", provider=endpoint.name, code=e.error.code, problem=e.error.message)
            raise
        keep_s = settings.keep_s
        if made.expires_at is not None:
            keep_s = min(keep_s, made.expires_at - time.time() - MARGIN_S / 2)
        if keep_s > 0:
            await self._files.put(one.name, made.file_id, keep_s)
        self._metrics.made(one.found.size)
        return made

    async def _tried(self, make: Callable[[], Coroutine[Any, Any, ProviderFile]]) -> ProviderFile:
        try:
            return await make()
        except UploadFailed as e:
            wait_s = e.error.retry_after_s or SECOND_TRY_S
            if not e.error.retryable or e.error.code == TOO_SLOW or wait_s > LONGEST_WAIT_S:
                raise
            await asyncio.sleep(wait_s)
        return await make()

    def _rest(self, name: str, error: ErrorInfo) -> None:
        now = time.monotonic()
        if len(self._resting) >= MOST_RESTING:
            self._resting = {n: rest for n, rest in self._resting.items() if rest[0] > now}
            while len(self._resting) >= MOST_RESTING:
                del self._resting[next(iter(self._resting))]
        asked_s = min(error.retry_after_s or 0.0, LONG_REST_S)
        seconds = max(REST_S, asked_s) if error.retryable else LONG_REST_S
        self._resting[name] = (now + seconds, error)

    def _rested(self, name: str) -> None:
        """Raises UploadFailed while uploads under this name are suspended."""
        until, error = self._resting.get(name, (0.0, None))
        if error is not None and until > time.monotonic():
            raise UploadFailed(error)


def _sendable(endpoint: Endpoint, api: FileApi, where: str, part: Media, found: Found) -> Sendable | None:
    """Return the blob as a potential file; None if the API does not take it."""
    kind: Kind = "image" if isinstance(part, ImagePart) else "document"
    source = cast("BlobSource", part.source)
    media_type = plain_media_type(source.media_type)
    if not found.size or found.size > api.max_bytes or not api.takes(kind, media_type):
        return None
    identity = (endpoint.account, source.blob_id, kind, media_type)
    name = blake2b(msgspec.json.encode(identity), digest_size=16).hexdigest()
    return Sendable(where=where, kind=kind, media_type=media_type, blob_id=source.blob_id, found=found, name=name)


def _too_much(
    media: Mapping[str, tuple[Media, Found]], named: Collection[str], sendable: list[Sendable], room: int | None
) -> list[Sendable]:
    """The largest of the other blobs, as many as must go for the rest to fit into the request."""
    if room is None:
        return []
    more: list[Sendable] = []
    over = _inside(media, named) - room
    for one in sorted(sendable, key=lambda one: one.found.size, reverse=True):
        if over <= 0:
            break
        if one.where not in named:
            more.append(one)
            over -= base64_size(one.found.size)
    return more


def _inside(media: Mapping[str, tuple[Media, Found]], named: Collection[str]) -> int:
    """The size in the request of the blobs that are not named as files."""
    return sum(base64_size(found.size) for where, (_, found) in media.items() if where not in named)

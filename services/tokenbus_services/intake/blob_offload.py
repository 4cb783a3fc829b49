"""Moves large base64 media of accepted requests to the blob store, so that the bus carries only references.

The arriving request still contains the data, bounded by the inbound stream's limit; the run's records, which live for
hours, contain the reference. Blobs that the request names get a lease here, because the run may have to wait.

If the store is unavailable, the request is still accepted: its media stay inline, at most `limits.request_bytes`, and
the store is not asked again for a while.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

import msgspec
import structlog

from tokenbus.blobs import plain_media_type
from tokenbus.bus import process_clock
from tokenbus.errors import BlobError, BlobRefused, BlobUnauthorized, BlobUnavailable, RequestInvalid
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    ContentPart,
    Generate,
    ImagePart,
    Message,
    Source,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from tokenbus_services.intake.usable_fallbacks import CallInput
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.media.locate import MediaFailed, media_in, media_of, request_with

# Opaque data are optional: a value that is gone or too large is left out with a note. Only if the store is temporarily
# away does the attempt end, to be retried.


MOST_BYTES = 16 * 2**20
"""Maximum bytes of all values of one turn."""

_Holding = TextPart | ThinkingPart | ImagePart | ToolCallPart


def blobs_named(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the ids of all blobs that hold opaque data of these messages."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, _Holding) and part.opaque_blobs:
                yield from part.opaque_blobs.values()


async def with_opaque_blobs(turn: CallInput, api: ApiName, blobs: RecentBlobs) -> CallInput:
    """Return the turn with its opaque data loaded; data of other APIs are not loaded. Raises MediaFailed."""
    if not any(True for _ in blobs_named([*turn.request.messages, *turn.history])):
        return turn
    loading = _Loading(api, blobs)
    messages, history = await asyncio.gather(
        loading.all(turn.request.messages, "messages"), loading.all(turn.history, "history")
    )
    request = msgspec.structs.replace(turn.request, messages=messages)
    return CallInput(request, history, (*turn.notes, *loading.notes))


class _Loading:
    def __init__(self, api: ApiName, blobs: RecentBlobs) -> None:
        self.notes: list[str] = []
        self._api = api
        self._blobs = blobs
        self._bytes = 0
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def all(self, messages: list[Message], root: str) -> list[Message]:
        return await asyncio.gather(*(self._message(m, f"{root}[{i}]") for i, m in enumerate(messages)))

    async def _message(self, message: Message, where: str) -> Message:
        if isinstance(message.content, str):
            return message
        parts = [await self._part(part, f"{where}.content[{j}]") for j, part in enumerate(message.content)]
        return msgspec.structs.replace(message, content=parts)

    async def _part(self, part: ContentPart, where: str) -> ContentPart:
        if not isinstance(part, _Holding) or not part.opaque_blobs:
            return part
        opaque = dict(part.opaque or {})
        if opaque.get("api", self._api) == self._api:
            for name, blob_id in part.opaque_blobs.items():
                value = await self._value(blob_id, f"{where}.opaque_blobs.{name}")
                if value is not None:
                    opaque[name] = value
        return msgspec.structs.replace(part, opaque=opaque, opaque_blobs=None)

    async def _value(self, blob_id: str, where: str) -> str | None:
        try:
            async with self._at_once:
                found = await self._blobs.find(blob_id)
                self._bytes += found.size
                if self._bytes > MOST_BYTES:
                    self.notes.append(f"{where}: left out, for together they have more than {MOST_BYTES} bytes")
                    return None
                async with aclosing(found.pieces()) as pieces:
                    return b"".join([piece async for piece in pieces]).decode()
        except UnicodeDecodeError:
            self.notes.append(f"{where}: left out, because the blob is not text")
        except BlobError as e:
            if e.retryable:
                raise MediaFailed(e, where) from e
            self.notes.append(f"{where}: left out: {e}")
        return None


TRIES = 2
TRY_S = 5.0
"""Longest time of one try."""
AWAY_S = 5.0
"""Pause before a store that failed is called again."""
AT_ONCE = 8
MOST_KEPT = 10_000
MOST_BLOBS = 1000
"""Maximum distinct blobs per request: requests read with it wait while they are leased."""

T = TypeVar("T")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class IntakeMedia:
    """Moves the large media of requests to the blob store."""

    def __init__(
        self,
        blobs: RecentBlobs,
        *,
        inline_characters: int,
        session_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``inline_characters``: base64 up to this length stays in the request. ``session_s``: see `keep`."""
        self._blobs = blobs
        self._inline_characters = inline_characters
        self._session_s = session_s
        self._kept: dict[str, float] = {}
        """When this worker last leased a blob of a session, by id."""
        self._clock = clock
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._away_until = 0.0

    async def offload(self, request: Generate) -> Generate:
        """Return the request as its run stores it.

        Raises RequestInvalid, naming the field, for large media with invalid base64 or type, and for too many blobs.
        """
        sources: dict[str, Source] = {}
        named = set(blobs_named(request.messages))
        if len(named) > MOST_BLOBS:
            raise RequestInvalid("messages", f"over {MOST_BLOBS} blobs in one request")
        for where, part in media_of(request):
            match part.source:
                case Base64Source() as source if len(source.data) > self._inline_characters:
                    sources[where] = await self._moved(where, source)
                case BlobSource() as source:
                    named.add(source.blob_id)
                    if len(named) > MOST_BLOBS:
                        raise RequestInvalid(where, f"over {MOST_BLOBS} blobs in one request")
                case _:
                    pass
        await asyncio.gather(*(self._lease(blob_id) for blob_id in named))
        return request_with(request, sources)

    async def keep(self, messages: Sequence[Message]) -> None:
        """Lease the blobs of a session's messages for ``session_s``. As cheap as nothing for those that this worker has
        leased in the last quarter of that time. Errors are ignored, as those of a run's lease.
        """
        named = set(blobs_named(messages))
        named |= {part.source.blob_id for _, part in media_in(messages, "") if isinstance(part.source, BlobSource)}
        since = self._clock() - self._session_s / 4
        due = [blob_id for blob_id in named if self._kept.get(blob_id, since) <= since]
        await asyncio.gather(*(self._keep(blob_id) for blob_id in due))

    async def _keep(self, blob_id: str) -> None:
        with suppress(BlobError):
            await self._call_store(lambda: self._blobs.lease_for(blob_id, self._session_s))
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[blob_id] = self._clock()

    async def _moved(self, where: str, source: Base64Source) -> Source:
        try:
            content = b64decode(source.data, validate=True)
        except ValueError:  # binascii.Error, or ValueError for non-ASCII text
            raise RequestInvalid(f"{where}.source.data", "it is not base64") from None
        try:
            blob_id = await self._call_store(lambda: self._blobs.store(content, plain_media_type(source.media_type)))
        except BlobRefused as e:
            raise RequestInvalid(f"{where}.source.media_type", e.problem) from None
        except BlobError:
            return source
        return BlobSource(blob_id=blob_id, media_type=source.media_type, size_bytes=len(content))

    async def _lease(self, blob_id: str) -> None:
        """Lease the blob. Errors are ignored here: the turn reports them if it ever sends the blob."""
        with suppress(BlobError):
            await self._call_store(lambda: self._blobs.lease(blob_id))

    async def _call_store(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the store, up to `TRIES` times. Raises BlobError."""
        async with self._at_once:
            for left in reversed(range(TRIES)):
                if self._clock() < self._away_until:
                    break
                try:
                    async with process_clock.timeout(TRY_S):
                        return await call()
                except (BlobUnavailable, BlobUnauthorized, TimeoutError) as e:
                    if not left:
                        self._away_until = self._clock() + AWAY_S
                        log.warning("blob_store_unavailable", problem=str(e) or f"no answer within {TRY_S:g} s")
        raise BlobUnavailable("blobs", "the store was unavailable a moment ago")

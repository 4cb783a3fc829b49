"""The media of one turn: finds and checks its blobs, and inserts them into the request while it is sent.

A provider's request builder is pure and knows only base64 and URLs. So each blob is represented by the base64 of an
unguessable mark. In the built body, marks show where blobs belong: as base64, or as bytes if the builder decoded it for
a form. A message that the builder drops leaves no mark, and its blobs are never loaded. If a blob already exists at the
provider as a file, the request is built again with the file in its place.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from contextlib import aclosing

import msgspec

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, plain_media_type
from tokenbus.errors import BlobError, BlobNotFound, RequestInvalid
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.requests import Base64Source, BlobSource, DocumentPart, Generate, Message, Source
from tokenbus.providers.api import Built
from tokenbus.providers.media import MediaLimits
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.uploads.plan import Uploads
from tokenbus_services.intake.blob_offload import with_opaque_blobs
from tokenbus_services.intake.usable_fallbacks import CallInput, model_and_tool_images, refused_media
from tokenbus_services.media.blob_cache import Found, RecentBlobs
from tokenbus_services.media.locate import (
    Embedded,
    Media,
    MediaBody,
    MediaFailed,
    PlaceholderMarks,
    media_in,
    media_of,
    own_media,
    request_with,
    with_sources,
)
from tokenbus_services.media.provider_limits import check_body, check_media, check_size, limits_of

LOOK_UPS = 8
"""Maximum concurrent blob look-ups per turn."""


class TurnMedia:
    """Builds the requests of turns, including their media."""

    def __init__(self, blobs: RecentBlobs, uploads: Uploads | None = None) -> None:
        self._blobs = blobs
        self._uploads = uploads

    async def build(
        self, endpoint: Endpoint, request: Generate, history: list[Message], *, lost: Collection[str] = ()
    ) -> tuple[Built, MediaBody | None]:
        """Return the turn's call, and its body if that contains blobs; otherwise the call's own body is used.

        The call lists the provider files that it names in place of blobs. ``lost``: files that the provider said it
        does not have. Raises RequestInvalid (a type, size or number that the provider does not take; whatever
        `Endpoint.build` raises), MediaFailed and UploadFailed. Images of tools and of the model raise none of these:
        they are left out.
        """
        api = endpoint.settings.api
        limits = limits_of(api, endpoint.settings.media)
        turn = await with_opaque_blobs(CallInput(request, history), api, self._blobs)
        turn = turn.without(refused_media(limits, turn, dict(_media(turn))))
        while True:
            try:
                built, body = await self._build(endpoint, turn, limits, lost=lost)
            except _Gone as e:
                left = turn.without(e.reasons)
                if len(dict(_media(left))) >= len(dict(_media(turn))):
                    raise RuntimeError(f"{len(e.reasons)} media cannot be sent, and cannot be left out") from e
                turn = left
            else:
                return msgspec.structs.replace(built, notes=(*turn.notes, *built.notes)), body

    async def _build(
        self, endpoint: Endpoint, turn: CallInput, limits: MediaLimits, *, lost: Collection[str]
    ) -> tuple[Built, MediaBody | None]:
        """Like `build`. Raises _Gone for images that can be left out."""
        request, history = turn.request, turn.history
        media = dict(_media(turn))
        if not media:
            return endpoint.build(request, history), None
        blobs = {where: part.source for where, part in media.items() if isinstance(part.source, BlobSource)}
        texts = {where: media[where] for where, source in blobs.items() if _is_text(media[where], source)}
        check_media(limits, texts.items())
        sources: dict[str, Source] = {}
        for where, found in (await self._find(texts, limits)).items():
            check_body(limits, found.size)
            sources[where] = await self._text(where, blobs[where], found)
        marked = {where: source for where, source in blobs.items() if where not in texts}
        built, pieces = _built(endpoint, request, history, sources, marked)
        wanted = dict.fromkeys(piece.where for piece in pieces if not isinstance(piece, bytes))
        left_out = set(marked).difference(wanted)
        used = {where: part for where, part in media.items() if where not in left_out}
        check_media(limits, used.items())
        found = await self._find({where: media[where] for where in wanted}, limits, spare=model_and_tool_images(turn))
        if self._uploads:
            room = None
            if limits.request_bytes is not None:
                room = limits.request_bytes - sum(len(piece) for piece in pieces if isinstance(piece, bytes))
            files = await self._uploads.name(
                endpoint,
                {where: (media[where], blob) for where, blob in found.items()},
                room=room,
                repeats=bool(history or (request.tools and request.max_tool_depth)),
                own=own_media(request.messages, "messages") | own_media(history, "history"),
                lost=lost,
            )
            if files:
                inside = {where: source for where, source in marked.items() if where not in files}
                built, pieces = _built(endpoint, request, history, {**sources, **files}, inside)
                call = msgspec.structs.replace(built.call, files=tuple(file.file_id for file in files.values()))
                built = msgspec.structs.replace(built, call=call)
        body = MediaBody(
            [
                p if isinstance(p, bytes) else Embedded(p.where, blobs[p.where].blob_id, found[p.where], p.raw)
                for p in pieces
            ]
        )
        check_body(limits, body.size)
        return built, body if len(pieces) > 1 else None

    async def _find(
        self, media: Mapping[str, Media], limits: MediaLimits, *, spare: Collection[str] = ()
    ) -> dict[str, Found]:
        """Find the blobs, keyed by place. Raises MediaFailed or RequestInvalid for the first bad one; _Gone if all
        bad ones are in ``spare``.
        """
        at_once = asyncio.Semaphore(LOOK_UPS)

        async def find(where: str, part: Media) -> Found | Exception:
            assert isinstance(part.source, BlobSource)
            try:
                async with at_once:
                    found = await self._blobs.find(part.source.blob_id)
                check_blob(where, part.source, found)
                check_size(limits, where, part, found.size)
                await self._blobs.check(part.source.blob_id, found)
            except BlobError as e:
                return MediaFailed(e, where)
            except RequestInvalid as e:
                return e
            return found

        async with asyncio.TaskGroup() as tasks:
            looking = {where: tasks.create_task(find(where, part)) for where, part in media.items()}
        found: dict[str, Found] = {}
        gone: dict[str, str] = {}
        for where, task in looking.items():
            match task.result():
                case RequestInvalid(problem=problem) if where in spare:
                    gone[where] = problem
                case MediaFailed(error=ErrorInfo(code=BlobNotFound.code)) if where in spare:
                    gone[where] = "its blob is gone"
                case Exception() as e:
                    raise e
                case Found() as blob:
                    found[where] = blob
        if gone:
            raise _Gone(gone)
        return found

    async def _text(self, where: str, source: BlobSource, found: Found) -> Base64Source:
        """Load a text blob completely: some APIs take it as plain text, so it is needed when the request is built."""
        try:
            async with aclosing(found.pieces()) as pieces:
                content = b"".join([piece async for piece in pieces])
        except BlobError as e:
            raise MediaFailed(e, where) from e
        return Base64Source(media_type=source.media_type, data=b64encode(content).decode())


class _Gone(Exception):
    """Images that no user supplied cannot be sent; by place, the reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(f"{len(reasons)} images")
        self.reasons = reasons


def _media(turn: CallInput) -> Iterator[tuple[str, Media]]:
    yield from media_of(turn.request)
    yield from media_in(turn.history, "history")


class _Place(msgspec.Struct, frozen=True):
    """Where a blob belongs in a body."""

    where: str
    raw: bool


def _built(
    endpoint: Endpoint,
    request: Generate,
    history: list[Message],
    sources: Mapping[str, Source],
    marked: Mapping[str, BlobSource],
) -> tuple[Built, list[bytes | _Place]]:
    """Build the call with these sources, and split its body where the ``marked`` blobs belong."""
    marks, places = PlaceholderMarks(), list(marked)
    marking = {
        where: Base64Source(media_type=source.media_type, data=marks.base64(n))
        for n, (where, source) in enumerate(marked.items())
    }
    sources = {**sources, **marking}
    built = endpoint.build(request_with(request, sources), with_sources(history, "history", sources))
    pieces = [p if isinstance(p, bytes) else _Place(places[p.number], p.raw) for p in marks.split(built.call.body)]
    return built, pieces


def check_blob(where: str, source: BlobSource, found: Found) -> None:
    """Check the blob against the request. Raises RequestInvalid if they differ. A store without a specific media
    type proves nothing.
    """
    stored, declared = found.media_type, source.media_type
    if stored and plain_media_type(stored) not in (DEFAULT_MEDIA_TYPE, plain_media_type(declared)):
        raise RequestInvalid(f"{where}.source.media_type", f"the blob is {plain_media_type(stored)}, not {declared}")
    if source.size_bytes not in (None, found.size):
        raise RequestInvalid(f"{where}.source.size_bytes", f"the blob has {found.size} bytes, not {source.size_bytes}")


def _is_text(part: Media, source: BlobSource) -> bool:
    return isinstance(part, DocumentPart) and source.media_type.startswith("text/")

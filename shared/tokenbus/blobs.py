"""Blob basics: an id that names the content, a media type, a size. No store and no IO here.

A blob's id is ``sha256:`` and the SHA-256 of its bytes as 64 lower-case hex digits, so content can be verified against
its id. Ids and media types come from untrusted sources and end up in paths and headers: use them only after
`parse_blob_id` or `parse_media_type`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from hashlib import sha256
from typing import Protocol, runtime_checkable

import msgspec

from tokenbus.errors import BlobRefused

DEFAULT_MEDIA_TYPE = "application/octet-stream"
MAX_MEDIA_TYPE_CHARS = 127

_ID = re.compile(r"sha256:([0-9a-f]{64})")
_TOKEN = r"[A-Za-z0-9][A-Za-z0-9!$&^_.+-]*"
"""A name per RFC 6838, 4.2, without ``#``: object_store rejects file names that end in ``#`` and digits."""
_TYPE = re.compile(rf"({_TOKEN})/({_TOKEN})")
_PARAMETER = re.compile(rf'({_TOKEN})=(?:({_TOKEN})|"({_TOKEN})")')


class BlobLoader(Protocol):
    """A blob store as the services use it: the blob service, or your own. Safe for concurrent use."""

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        """Store content; the same content gives the same blob. Raises BlobError, and any exception of ``content``."""
        ...

    async def load(self, blob_id: str) -> bytes:
        """Return a blob's whole content, verified against its id.

        Extends the blob's life by the maximum duration of a run. Raises BlobError.
        """
        ...

    async def aclose(self) -> None:
        """Close its connections."""
        ...


@runtime_checkable
class BlobStreams(BlobLoader, Protocol):
    """A loader that can also describe a blob and stream it, so that large blobs need not be held in memory."""

    async def head(self, blob_id: str) -> BlobRef:
        """Return the metadata of a stored blob. Raises BlobError."""
        ...

    def chunks(self, blob_id: str) -> AsyncIterator[bytes]:
        """Yield a blob's content in pieces, the last one only after the checksum was verified. Raises BlobError."""
        ...

    async def lease(self, blob_id: str) -> None:
        """Extend the blob's life by the maximum duration of a run, from now. Raises BlobError."""
        ...


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """One stored blob, as returned for an upload and as sent on the bus."""

    blob_id: str
    media_type: str
    size: int
    """Bytes."""


def blob_id_of(content: bytes) -> str:
    """Return the blob id of this content: ``sha256:`` and 64 hexadecimal digits."""
    return blob_id_from_digest(sha256(content).hexdigest())


def blob_id_from_digest(hex_digest: str) -> str:
    """The id for a known SHA-256, given as 64 lower-case hex digits."""
    return f"sha256:{hex_digest}"


def parse_blob_id(text: str) -> str:
    """Return the hex digest in a blob id. Raises BlobRefused unless it is ``sha256:`` and 64 lower-case hex digits."""
    match = _ID.fullmatch(text)
    if match is None:
        raise BlobRefused("blob id", f"{text[:80]!r} is not sha256: and 64 lower-case hex digits")
    return match[1]


def plain_media_type(text: str) -> str:
    """The media type in the form providers know: lower case, without parameters, ``image/jpeg`` for the common
    misspelling ``image/jpg``. Does not validate.
    """
    plain = text.partition(";")[0].strip().lower()
    return "image/jpeg" if plain == "image/jpg" else plain


def parse_media_type(text: str) -> str:
    """Normalize a media type to ``type/subtype;name=value``: lower-case names, no spaces, no quotes.

    Accepts the syntax of RFC 9110, 8.3.1, except quoted values that need their quotes: those are not safe in a path or
    a header. Raises BlobRefused.
    """
    head, *rest = (piece.strip(" \t") for piece in text.split(";"))
    match = _TYPE.fullmatch(head)
    if match is None:
        raise BlobRefused("media type", f"{text[:80]!r} is not of the form type/subtype")
    pieces = [head.lower()]
    for piece in rest:
        if not piece:
            continue
        parameter = _PARAMETER.fullmatch(piece)
        if parameter is None:
            raise BlobRefused("media type", f"parameter {piece[:80]!r} is not of the form name=value")
        pieces.append(f"{parameter[1].lower()}={parameter[2] or parameter[3]}")
    media_type = ";".join(pieces)
    if len(media_type) > MAX_MEDIA_TYPE_CHARS:
        raise BlobRefused("media type", f"longer than {MAX_MEDIA_TYPE_CHARS} characters")
    return media_type

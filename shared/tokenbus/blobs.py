"""What a blob is to everyone: an id that names its content, a media type, a size. No store and no IO here.

A blob's id is ``sha256:`` and the SHA-256 of its bytes as 64 lower-case hex digits, so an id can be checked
against what it brought. Ids and media types come from outside and end up in paths and headers: nothing goes on
that has not passed `parse_blob_id` or `parse_media_type`.
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
"""A name of RFC 6838, 4.2, but for ``#``: object_store takes no file name that ends in ``#`` and digits."""
_TYPE = re.compile(rf"({_TOKEN})/({_TOKEN})")
_PARAMETER = re.compile(rf'({_TOKEN})=(?:({_TOKEN})|"({_TOKEN})")')


class BlobLoader(Protocol):
    """A store of blobs as the services use one: the blob service, or your own. Safe to use from many tasks."""

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        """Store content; the same content again is the same blob. Raises BlobError, and what ``content`` raises."""
        ...

    async def load(self, blob_id: str) -> bytes:
        """A blob's whole content, which has this id's checksum. The blob then stays for as long as a run may be open.
        Raises BlobError."""
        ...

    async def aclose(self) -> None:
        """Give up its connections."""
        ...


@runtime_checkable
class BlobStreams(BlobLoader, Protocol):
    """A loader that can also say what a blob is and give it in pieces: nobody then holds a large one whole."""

    async def head(self, blob_id: str) -> BlobRef:
        """What is stored under this id. Raises BlobError."""
        ...

    def chunks(self, blob_id: str) -> AsyncIterator[bytes]:
        """A blob's content in pieces. The last comes only after the checksum of the whole was found right. Raises
        BlobError."""
        ...

    async def lease(self, blob_id: str) -> None:
        """Let the blob live for as long as a run may be open, from now on. Raises BlobError."""
        ...


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """One stored blob, as the store answers an upload and as it may travel on the bus."""

    blob_id: str
    media_type: str
    size: int
    """Bytes."""


def blob_id_of(content: bytes) -> str:
    """The id of this content."""
    return blob_id_from_digest(sha256(content).hexdigest())


def blob_id_from_digest(hex_digest: str) -> str:
    """The id for a SHA-256 already computed, as 64 lower-case hex digits."""
    return f"sha256:{hex_digest}"


def parse_blob_id(text: str) -> str:
    """The hex digest inside a blob id. Raises BlobRefused for anything but ``sha256:`` and 64 lower-case hex digits."""
    match = _ID.fullmatch(text)
    if match is None:
        raise BlobRefused("blob id", f"{text[:80]!r} is not sha256: and 64 lower-case hex digits")
    return match[1]


def plain_media_type(text: str) -> str:
    """The media type as providers know it: without parameters, in lower case; ``image/jpg``, which many write, is
    ``image/jpeg``. Checks nothing."""
    plain = text.partition(";")[0].strip().lower()
    return "image/jpeg" if plain == "image/jpg" else plain


def parse_media_type(text: str) -> str:
    """The media type in one spelling: ``type/subtype;name=value``, names in lower case, no blanks, no quotes.

    Takes what RFC 9110, 8.3.1 allows, but for quoted values that need their quotes: those could not stand in a
    path or a header as they are. Raises BlobRefused.
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

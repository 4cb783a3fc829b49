"""Multipart form bodies (multipart/form-data, RFC 7578), for APIs that take bytes rather than JSON.

The boundary is a digest of the whole form: identical forms get identical boundaries, and no form can contain its own
digest. (This does not hold if the author of a file knows the content that will later replace a placeholder.) Part
contents are not escaped: a file appears in the body byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import cast

import msgspec


class File(msgspec.Struct, frozen=True):
    """A form part with file content."""

    field: str
    filename: str
    media_type: str
    """Must come from `tokenbus.blobs.parse_media_type`, because it is written into a header."""
    content: bytes


def form(fields: Mapping[str, object], files: Sequence[File]) -> tuple[str, bytes]:
    """Return the `content-type` header value and the body. ``fields`` hold JSON values; nulls are omitted."""
    parts = [(_disposition(name), value.encode()) for name, value in _flat(fields)]
    for file in files:
        named = f'{_disposition(file.field)}; filename="{_quoted(file.filename)}"'
        parts.append((f"{named}\r\ncontent-type: {file.media_type}", file.content))
    digest = blake2b(digest_size=24)  # RFC 2046 allows boundaries of up to 70 characters
    for head, content in parts:
        for piece in (head.encode(), content):
            digest.update(len(piece).to_bytes(8))
            digest.update(piece)
    boundary = f"tokenbus-{digest.hexdigest()}"
    pieces: list[bytes] = []
    for head, content in parts:
        pieces += (f"--{boundary}\r\n{head}\r\n\r\n".encode(), content, b"\r\n")
    return f"multipart/form-data; boundary={boundary}", b"".join([*pieces, f"--{boundary}--\r\n".encode()])


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Flatten fields the way OpenAI's SDKs do: ``a[b]`` for object members, ``a[]`` for list elements."""
    match value:
        case Mapping():
            for key, inner in cast("Mapping[str, object]", value).items():
                yield from _flat(inner, f"{name}[{key}]" if name else key)
        case list():
            for inner in cast("list[object]", value):
                yield from _flat(inner, f"{name}[]")
        case str():
            yield name, value
        case None:
            pass
        case _:
            yield name, msgspec.json.encode(value).decode()


def _disposition(name: str) -> str:
    return f'content-disposition: form-data; name="{_quoted(name)}"'


def _quoted(name: str) -> str:
    """Quote the way browsers do (https://html.spec.whatwg.org, "multipart/form-data encoding algorithm")."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")

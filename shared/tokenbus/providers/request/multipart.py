"""A request's body as a form with files (multipart/form-data, RFC 7578), for the APIs that take bytes and no JSON.

Its boundary is the digest of all that is in it: the same for the same form, and nothing in a form can hold the form's
own digest. (What is put in place of a file's content later must not have been known to whoever wrote the file.) Nothing
is escaped inside of a part: a file is in the body as the bytes that it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import cast

import msgspec


class File(msgspec.Struct, frozen=True):
    """A part that is a file."""

    field: str
    filename: str
    media_type: str
    """As `tokenbus.blobs.parse_media_type` gives it: it stands in a head of its own."""
    content: bytes


def form(fields: Mapping[str, object], files: Sequence[File]) -> tuple[str, bytes]:
    """The value of the header `content-type`, and the body. ``fields`` as JSON has them; what is null is left out."""
    parts = [(_disposition(name), value.encode()) for name, value in _flat(fields)]
    for file in files:
        named = f'{_disposition(file.field)}; filename="{_quoted(file.filename)}"'
        parts.append((f"{named}\r\ncontent-type: {file.media_type}", file.content))
    digest = blake2b(digest_size=24)  # a boundary has 70 characters at the most
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
    """Fields and their values: ``a[b]`` for what stands in an object, ``a[]`` for each of a list, as OpenAI's SDKs."""
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
    """As browsers write it (https://html.spec.whatwg.org, "multipart/form-data encoding algorithm")."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")

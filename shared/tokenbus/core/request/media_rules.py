"""Rules for inline media of a request, independent of provider and size."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator

from tokenbus.events.requests import Base64Source, DocumentPart, Generate, ImagePart, ToolResultPart

_TYPE = re.compile(r"\s*[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*\s*(?:;.*)?", re.DOTALL)


def media_problems(request: Generate) -> Iterator[tuple[str, str]]:
    """Each place with invalid media, with the problem."""
    for where, source in _inside(request):
        if not _TYPE.fullmatch(source.media_type):
            yield f"{where}.media_type", f"{source.media_type[:80]!r} is not a media type such as image/png"
        if problem := _base64_problem(source.data):
            yield f"{where}.data", problem


def _base64_problem(data: str) -> str | None:
    if not data:
        return "it is empty"
    if data[:5].lower() == "data:":
        return "it is a data URL: send what follows its comma, and its type as media_type"
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # binascii's own error, or non-ASCII text
        return "it is not base64"
    return None


def _inside(request: Generate) -> Iterator[tuple[str, Base64Source]]:
    """Each inline base64 source with its path."""
    if request.images and request.images.mask:
        yield from _of("images.mask", request.images.mask)
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{i}].content[{j}]"
            yield from _of(where, part)
            if isinstance(part, ToolResultPart) and not isinstance(part.content, str):
                for k, inner in enumerate(part.content):
                    yield from _of(f"{where}.content[{k}]", inner)


def _of(where: str, part: object) -> Iterator[tuple[str, Base64Source]]:
    if isinstance(part, ImagePart | DocumentPart) and isinstance(part.source, Base64Source):
        yield f"{where}.source", part.source

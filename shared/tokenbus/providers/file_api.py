"""Provider file APIs: upload media that many requests use once, then refer to it by id.

Sans-IO: an upload is a generator that yields HTTP calls, receives their answers and returns the file. The file content
is inserted into a call's body unchanged, so the caller may pass a placeholder and substitute the real content when it
sends the body.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Literal, Protocol

import msgspec

Kind = Literal["image", "document"]

_ENDINGS = {
    "application/pdf": "pdf",
    "application/json": "json",
    "application/msword": "doc",
    "application/rtf": "rtf",
    "application/vnd.ms-excel": "xls",
    "application/vnd.ms-powerpoint": "ppt",
    "application/vnd.oasis.opendocument.text": "odt",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "pptx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "image/jpeg": "jpg",
    "text/markdown": "md",
    "text/plain": "txt",
}
"""File extensions for media types whose subtype is not the extension. OpenAI goes by the file name."""
_LOST = (b"file_expired", b"file_not_found")
"""Error names that mean a lost file when the error does not name the file (Anthropic's SDK has the first)."""
LOST_STATUSES = frozenset((400, 403, 404, 410, 422))


class FileToUpload(msgspec.Struct, frozen=True, kw_only=True):
    """Media to upload to a provider."""

    kind: Kind
    media_type: str
    """Without parameters."""
    size: int
    """Bytes."""
    keep_s: float
    """Minimum retention in seconds. If the API has no such option, the provider's own retention applies."""

    @property
    def name(self) -> str:
        """A file name that reveals the content type and nothing about the origin."""
        subtype = self.media_type.partition("/")[2]
        ending = _ENDINGS.get(self.media_type, subtype if subtype.isalnum() else "bin")
        return f"{self.kind}.{ending}"


class FileCall(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP call of an upload."""

    path: str
    """Path from the root of the provider's address, or a full URL from the provider. A full URL carries its own
    authorization, so no key is sent.
    """
    method: Literal["GET", "POST"] = "POST"
    headers: dict[str, str] = {}
    body: bytes = b""
    pause_s: float = 0.0
    """Seconds to wait before the call."""


class FileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A successful answer to a `FileCall`."""

    headers: Mapping[str, str]
    """Names are lower case."""
    body: bytes


class ProviderFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file that requests may now refer to."""

    file_id: str
    expires_at: float | None = None
    """Unix time in seconds; None: the provider gave no expiry."""


Upload = Generator[FileCall, FileAnswer, ProviderFile]


class FileApi(Protocol):
    """A provider's file API, as far as its requests can refer to files."""

    max_bytes: int
    """Maximum size of one file."""

    def takes(self, kind: Kind, media_type: str) -> bool:
        """Whether a request can refer to a file of this kind and media type (without parameters) by id."""
        ...

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
        """Yield the calls of an upload. ``base_path``: path of the provider's address, without a trailing slash.

        Raises Malformed if an answer is invalid.
        """
        ...


def lost_files(status: int, body: bytes, file_ids: Collection[str]) -> tuple[str, ...]:
    """Return the requested files that the provider's error reports as missing or expired.

    Gemini names a file by the end of its URI.

    Anthropic: "File not found: file_…" (https://platform.claude.com/docs/en/build-with-claude/files, "Error handling");
    Gemini: 403 "You do not have permission to access the File … or it may not exist"
    (https://github.com/googleapis/python-genai/issues/1218). An error that names a file for another reason looks the
    same; it then recurs when the bytes are sent instead.
    """
    if status not in LOST_STATUSES:
        return ()
    named = tuple(file_id for file_id in file_ids if file_id.rpartition("/")[2].encode() in body)
    return named or (tuple(file_ids) if any(word in body for word in _LOST) else ())


def bounded_life(keep_s: float, least_s: int, most_s: int) -> int:
    """Round to whole seconds, clamped to the range the API accepts."""
    return min(max(round(keep_s), least_s), most_s)

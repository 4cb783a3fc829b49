"""The file APIs of providers: media that many requests name are sent there once, and named by an id.

Sans-IO: an upload is a generator that yields the calls to make, is sent their answers, and returns the file. What it is
handed as the file's content goes into a call's body as it is; so a mark may stand for a content that takes its place
when the body is sent.
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
"""Where a file's name does not end with the subtype of its media type; OpenAI goes by the name."""
_LOST = (b"file_expired", b"file_not_found")
"""Names of errors, for a file that is not named beside them (Anthropic's SDK has the first)."""
LOST_STATUSES = frozenset((400, 403, 404, 410, 422))


class FileToUpload(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become a file of the provider's."""

    kind: Kind
    media_type: str
    """Without parameters."""
    size: int
    """Bytes."""
    keep_s: float
    """So long the provider should have it, at least. Where its API cannot be told, it keeps its own time."""

    @property
    def name(self) -> str:
        """A file name that says what is in it, and nothing of where it comes from."""
        subtype = self.media_type.partition("/")[2]
        ending = _ENDINGS.get(self.media_type, subtype if subtype.isalnum() else "bin")
        return f"{self.kind}.{ending}"


class FileCall(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP call of an upload."""

    path: str
    """From the root of the provider's address; or a whole URL, where the provider gave it: it has its own rights in it,
    and gets no key."""
    method: Literal["GET", "POST"] = "POST"
    headers: dict[str, str] = {}
    body: bytes = b""
    pause_s: float = 0.0
    """To wait before it."""


class FileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one, which was no error."""

    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class ProviderFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that requests may name now."""

    file_id: str
    expires_at: float | None = None
    """Unix time in seconds; None: the provider names none."""


Upload = Generator[FileCall, FileAnswer, ProviderFile]


class FileApi(Protocol):
    """The file API of a provider, as far as its requests can name files."""

    max_bytes: int
    """Of one file."""

    def takes(self, kind: Kind, media_type: str) -> bool:
        """Whether a request can name a file of this type, without parameters, by its id."""
        ...

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
        """The calls of an upload; ``base_path``: the path of the provider's address, without a slash at its end.

        Raises Malformed for an answer that is none.
        """
        ...


def lost_files(status: int, body: bytes, file_ids: Collection[str]) -> tuple[str, ...]:
    """Those of the files that a request named which its provider does not have, or no longer, by its error: it names
    them. Gemini's are named by the end of their URI.

    Anthropic: "File not found: file_…" (https://platform.claude.com/docs/en/build-with-claude/files, "Error handling");
    Gemini: 403 "You do not have permission to access the File … or it may not exist"
    (https://github.com/googleapis/python-genai/issues/1218). An error that names a file for another reason looks the
    same; then it comes again when its bytes are sent in its place.
    """
    if status not in LOST_STATUSES:
        return ()
    named = tuple(file_id for file_id in file_ids if file_id.rpartition("/")[2].encode() in body)
    return named or (tuple(file_ids) if any(word in body for word in _LOST) else ())


def bounded_life(keep_s: float, least_s: int, most_s: int) -> int:
    """So many seconds, as an API takes them: no fewer than ``least_s``, no more than ``most_s``."""
    return min(max(round(keep_s), least_s), most_s)

"""Mocks the file APIs of three providers: stores uploads and checks that requested files exist.

Only size and digest of a file are kept. Sources: "Files API" of the Claude API documentation, "Files" of the OpenAI API
reference, "Files API" of the Gemini API documentation.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, cast

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider import anthropic, gemini, openai_chat
from tokenbus_services.mock_provider.multipart import read_form
from tokenbus_services.mock_provider.plan import Plan, failed, refusal
from tokenbus_services.mock_provider.provider_api import CREATED, MockApi
from tokenbus_services.mock_provider.request import Refused, read_as
from tokenbus_services.mock_provider.request_log import Received
from tokenbus_services.mock_provider.script import Status

BETA = "files-api-2025-04-14"
FILES = "/v1/files"
"""Anthropic's and OpenAI's alike; their versions tell them apart."""

_GEMINI_UPLOAD = re.compile(r"/upload/v1beta/files")
_GEMINI_FILE = re.compile(r"/v1beta/(files/[a-z0-9-]+)")
_encode = msgspec.json.Encoder().encode


class StoredFile(msgspec.Struct, kw_only=True):
    """One uploaded file."""

    file_id: str
    """As requests name it."""
    api: ApiName
    filename: str
    media_type: str
    size: int
    sha256: str
    fields: dict[str, str] = {}
    """What else the form said."""


class _Named(msgspec.Struct, frozen=True, rename="camel"):
    display_name: str = ""


class _Description(msgspec.Struct):
    """What the first call of a resumable upload says."""

    file: _Named = _Named()


class _Begun(msgspec.Struct):
    """A resumable upload whose content is still to come."""

    filename: str
    media_type: str
    size: int


class FileStore:
    """The files of one server. Tests can inspect `files`, expire them, and make uploads fail."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.processing = 0
        """How often a Gemini file is reported as processing before it can be used."""
        self._failing: deque[Status] = deque()
        self._begun: dict[str, _Begun] = {}
        self._looks: dict[str, int] = {}
        self._made = 0

    def vanish(self, file_id: str) -> None:
        """Expire the file now."""
        del self.files[file_id]

    def fail(self, *faults: Status) -> None:
        """Make the next uploads fail with these errors, one each."""
        self._failing.extend(faults)

    def plan(self, received: Received) -> Plan | None:
        """Plan the response to a file API call; None for any other call."""
        dialect = _dialect(received)
        if dialect is None:
            return None
        try:
            if self._failing and received.method == "POST":
                return failed(dialect, self._failing.popleft())
            if dialect is gemini.dialect:
                return self._gemini(received)
            return self._form(dialect, received)
        except Refused as refused:
            return refusal(dialect, refused)

    def check(self, api: ApiName, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        """Raise Refused if a request refers to a missing file."""
        for name in _named(body):
            if api == "anthropic" and BETA not in headers.get("anthropic-beta", ""):
                raise Refused(400, "messages: a source of type file needs the beta header of the Files API")
            file = self.files.get(name)
            if file is not None and _house(file.api) == _house(api):
                continue
            match api:
                case "anthropic":
                    raise Refused(404, f"File not found: {name}")
                case "gemini":
                    last = name.rpartition("/")[2]
                    raise Refused(403, f"You do not have permission to access the File {last} or it may not exist.")
                case _:
                    raise Refused(404, f"There is no file with the id '{name}'.")

    def _form(self, dialect: MockApi, received: Received) -> Plan:
        if received.method != "POST":
            raise Refused(405, f"{received.path} takes POST, not {received.method}")
        if dialect is anthropic.dialect and BETA not in received.headers.get("anthropic-beta", ""):
            raise Refused(400, "anthropic-beta: the header of the Files API is required")
        file, fields = _parts(received)
        if dialect is openai_chat.dialect and fields.get("purpose") not in ("user_data", "vision", "assistants"):
            raise Refused(400, f"purpose: {fields.get('purpose')!r} is not a purpose of files that requests can use")
        self._made += 1
        content: bytes = file["data"]
        anthropics = dialect is anthropic.dialect
        stored = StoredFile(
            file_id=f"{'file_' if anthropics else 'file-'}{self._made:022d}",
            api=dialect.name,
            filename=file["filename"],
            media_type=file["media_type"],
            size=len(content),
            sha256=sha256(content).hexdigest(),
            fields=fields,
        )
        self.files[stored.file_id] = stored
        return _json(_anthropic(stored) if anthropics else _openai(stored))

    def _gemini(self, received: Received) -> Plan:
        if found := _GEMINI_FILE.fullmatch(received.path):
            uri = f"{_origin(received)}/v1beta/{found[1]}"
            if uri not in self.files:
                raise Refused(403, f"You do not have permission to access the File {found[1]} or it may not exist.")
            self._looks[uri] -= 1
            return _json(self._described(self.files[uri]))
        command = received.headers.get("x-goog-upload-command")
        if command == "start":
            return self._begin(received)
        begun = self._begun.pop(received.query.get("upload_id", ""), None)
        if command != "upload, finalize" or begun is None:
            raise Refused(400, "an upload begins with `start` and ends with `upload, finalize`")
        if len(received.body) != begun.size:
            raise Refused(400, f"received {len(received.body)} bytes instead of the declared {begun.size}")
        self._made += 1
        uri = f"{_origin(received)}/v1beta/files/f{self._made:011d}"
        self.files[uri] = stored = StoredFile(
            file_id=uri,
            api="gemini",
            filename=begun.filename,
            media_type=begun.media_type,
            size=begun.size,
            sha256=sha256(received.body).hexdigest(),
        )
        self._looks[uri] = self.processing
        return _json({"file": self._described(stored)}, {"x-goog-upload-status": "final"})

    def _begin(self, received: Received) -> Plan:
        headers = received.headers
        described = read_as(msgspec.json.decode(received.body or b"{}"), _Description)
        upload_id = f"u{len(self._begun)}-{self._made}-{time.monotonic_ns()}"
        self._begun[upload_id] = _Begun(
            described.file.display_name,
            headers.get("x-goog-upload-header-content-type", ""),
            int(headers.get("x-goog-upload-header-content-length", "-1")),
        )
        url = f"{_origin(received)}/upload/v1beta/files?upload_id={upload_id}"
        return _json({}, {"x-goog-upload-url": url, "x-goog-upload-status": "active"})

    def _described(self, file: StoredFile) -> dict[str, object]:
        return {
            "name": file.file_id.partition("/v1beta/")[2],
            "displayName": file.filename,
            "mimeType": file.media_type,
            "sizeBytes": str(file.size),
            "expirationTime": datetime.fromtimestamp(time.time() + 48 * 3600, UTC).isoformat(),
            "uri": file.file_id,
            "state": "PROCESSING" if self._looks[file.file_id] > 0 else "ACTIVE",
        }


def _dialect(received: Received) -> MockApi | None:
    """Whose file API this is a call of."""
    if received.path == FILES:
        return anthropic.dialect if "anthropic-version" in received.headers else openai_chat.dialect
    return gemini.dialect if _GEMINI_UPLOAD.fullmatch(received.path) or _GEMINI_FILE.fullmatch(received.path) else None


def _house(api: ApiName) -> str:
    """Those of one house share their files."""
    return api.partition("-")[0]


def _parts(received: Received) -> tuple[dict[str, Any], dict[str, str]]:
    """The field `file` of a form, and its others. Raises Refused."""
    fields = read_form(received.headers.get("content-type", ""), received.body)
    file = fields.pop("file", None)
    if not isinstance(file, dict):
        raise Refused(400, "file: field required")
    return cast("dict[str, Any]", file), fields


def _named(value: object) -> Iterator[str]:
    """The files that a request's body names, at whatever depth."""
    match value:
        case dict():
            for key, inner in cast("dict[str, object]", value).items():
                if key in ("file_id", "fileUri", "file_uri") and isinstance(inner, str):  # Google takes both spellings
                    if key == "file_id" or "/v1beta/files/" in inner:
                        yield inner
                else:
                    yield from _named(inner)
        case list():
            for inner in cast("list[object]", value):
                yield from _named(inner)
        case _:
            pass


def _anthropic(file: StoredFile) -> dict[str, object]:
    said: dict[str, object] = {"id": file.file_id, "type": "file", "filename": file.filename, "downloadable": False}
    if seconds := file.fields.get("expires_in_seconds"):
        said["expires_at"] = datetime.fromtimestamp(time.time() + int(seconds), UTC).isoformat()
    created = datetime.fromtimestamp(CREATED, UTC).isoformat()
    return said | {"mime_type": file.media_type, "size_bytes": file.size, "created_at": created}


def _openai(file: StoredFile) -> dict[str, object]:
    said: dict[str, object] = {"id": file.file_id, "object": "file", "filename": file.filename, "bytes": file.size}
    if seconds := file.fields.get("expires_after[seconds]"):
        said["expires_at"] = round(time.time()) + int(seconds)
    return said | {"created_at": CREATED, "purpose": file.fields["purpose"], "status": "processed"}


def _origin(received: Received) -> str:
    return f"http://{received.headers['host']}"


def _json(body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Plan:
    return Plan(status=200, headers={"content-type": "application/json", **(headers or {})}, reads=[_encode(body)])

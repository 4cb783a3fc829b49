"""Mocks the file APIs of three providers: stores uploads and checks that requested files exist.

Only size, digest and beginning of a file are kept. Sources: "Files API" of the Claude API documentation, "Files" of the
OpenAI API reference, "Files API" of the Gemini API documentation.
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
from tokenbus_services.mock_provider.apis import anthropic, gemini, openai_chat
from tokenbus_services.mock_provider.apis.provider_api import CREATED, MockApi
from tokenbus_services.mock_provider.plan import ResponsePlan, plan_rejection, plan_scripted_error
from tokenbus_services.mock_provider.request import HttpError, decode_as, read_form
from tokenbus_services.mock_provider.request_log import HttpRequest
from tokenbus_services.mock_provider.script import Status

BETA = "files-api-2025-04-14"
FILES = "/v1/files"
"""For Anthropic and OpenAI; the version headers distinguish them."""

_GEMINI_UPLOAD = re.compile(r"/upload/v1beta/files")
_GEMINI_FILES = "/v1beta/files"
_GEMINI_FILE = re.compile(r"/v1beta/(files/[a-z0-9-]+)(:download)?")
_OTHER_FILE = re.compile(r"/v1/files/([^/]+)(/content)?")
_KEPT_BYTES = 4096
_PURPOSES = ("user_data", "vision", "assistants", "batch")
_encode = msgspec.json.Encoder().encode


class StoredFile(msgspec.Struct, kw_only=True):
    file_id: str
    """As requests name it."""
    api: ApiName
    filename: str
    media_type: str
    size: int
    sha256: str
    fields: dict[str, str] = {}
    """The other fields of the form."""
    beginning: bytes = b""
    """Of its content."""


class _Named(msgspec.Struct, frozen=True, rename="camel"):
    display_name: str = ""


class _Description(msgspec.Struct):
    """The body of the first call of a resumable upload."""

    file: _Named = _Named()


class _OpenUpload(msgspec.Struct):
    """A resumable upload whose content has not all arrived yet."""

    filename: str
    media_type: str
    size: int
    content: bytes = b""


class FileStore:
    """The files of one server. Tests can inspect `files`, expire them, and make uploads fail."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.processing = 0
        """How often a Gemini file is reported as processing before it can be used."""
        self._scripted_errors: deque[Status] = deque()
        self._open_uploads: dict[str, _OpenUpload] = {}
        self._polls_until_active: dict[str, int] = {}
        self._created = 0

    def expire(self, file_id: str) -> None:
        del self.files[file_id]

    def fail_next_uploads(self, *faults: Status) -> None:
        """Make the next uploads fail with these errors, one each."""
        self._scripted_errors.extend(faults)

    def plan(self, http_request: HttpRequest) -> ResponsePlan | None:
        """Plan the response to a file API call; None for any other call."""
        mock_api = _mock_api_of(http_request)
        if mock_api is None:
            return None
        try:
            if self._scripted_errors and http_request.method == "POST":
                return plan_scripted_error(mock_api, self._scripted_errors.popleft())
            if mock_api is gemini.mock_api:
                return self._handle_gemini(http_request)
            if http_request.method == "POST":
                return self._store_form(mock_api, http_request)
            return self._stored(mock_api, http_request)
        except HttpError as rejected:
            return plan_rejection(mock_api, rejected)
        except (msgspec.DecodeError, ValueError, KeyError) as e:  # a length that is no number, a header that is missing
            return plan_rejection(mock_api, HttpError(400, f"{type(e).__name__}: {e}"))

    def check(self, api: ApiName, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        """Raise Rejected if a request refers to a missing file."""
        for name in _file_ids(body):
            if api == "anthropic" and BETA not in headers.get("anthropic-beta", ""):
                raise HttpError(400, "messages: a source of type file needs the beta header of the Files API")
            file = self.files.get(name)
            if file is not None and _vendor(file.api) == _vendor(api):
                continue
            match api:
                case "anthropic":
                    raise HttpError(404, f"File not found: {name}")
                case "gemini":
                    last = name.rpartition("/")[2]
                    raise HttpError(403, f"You do not have permission to access the File {last} or it may not exist.")
                case _:
                    raise HttpError(404, f"There is no file with the id '{name}'.")

    def _stored(self, mock_api: MockApi, http_request: HttpRequest) -> ResponsePlan:
        """List the files, or answer for one of them."""
        described = _anthropic if mock_api is anthropic.mock_api else _openai
        of_api = [file for file in self.files.values() if _vendor(file.api) == _vendor(mock_api.name)]
        found = _OTHER_FILE.fullmatch(http_request.path)
        if found is None:
            return _json({"object": "list", "data": [described(file) for file in of_api], "has_more": False})
        file = next((file for file in of_api if file.file_id == found[1]), None)
        if file is None:
            raise HttpError(404, f"there is no file {found[1]!r}")
        if http_request.method == "DELETE":
            del self.files[file.file_id]
            return _json({"id": file.file_id, "object": "file", "type": "file_deleted", "deleted": True})
        if found[2]:
            content_type = {"content-type": file.media_type or "application/octet-stream"}
            return ResponsePlan(status=200, headers=content_type, reads=[file.beginning])
        return _json(described(file))

    def _store_form(self, mock_api: MockApi, http_request: HttpRequest) -> ResponsePlan:
        if mock_api is anthropic.mock_api and BETA not in http_request.headers.get("anthropic-beta", ""):
            raise HttpError(400, "anthropic-beta: the header of the Files API is required")
        file, fields = _parts(http_request)
        if mock_api is openai_chat.mock_api and fields.get("purpose") not in _PURPOSES:
            raise HttpError(400, f"purpose: {fields.get('purpose')!r} is not a purpose of files that requests can use")
        self._created += 1
        content: bytes = file["data"]
        anthropics = mock_api is anthropic.mock_api
        stored = StoredFile(
            file_id=f"{'file_' if anthropics else 'file-'}{self._created:022d}",
            api=mock_api.name,
            filename=file["filename"],
            media_type=file["media_type"],
            size=len(content),
            sha256=sha256(content).hexdigest(),
            fields=fields,
            beginning=content[:_KEPT_BYTES],
        )
        self.files[stored.file_id] = stored
        return _json(_anthropic(stored) if anthropics else _openai(stored))

    def _handle_gemini(self, http_request: HttpRequest) -> ResponsePlan:
        if http_request.path == _GEMINI_FILES:
            return _json({"files": [self._gemini_file(file) for file in self.files.values() if file.api == "gemini"]})
        if found := _GEMINI_FILE.fullmatch(http_request.path):
            uri = f"{_origin(http_request)}/v1beta/{found[1]}"
            if uri not in self.files:
                raise HttpError(403, f"You do not have permission to access the File {found[1]} or it may not exist.")
            if http_request.method == "DELETE":
                del self.files[uri]
                return _json({})
            if found[2]:
                content_type = {"content-type": self.files[uri].media_type}
                return ResponsePlan(status=200, headers=content_type, reads=[self.files[uri].beginning])
            self._polls_until_active[uri] -= 1
            return _json(self._gemini_file(self.files[uri]))
        command = http_request.headers.get("x-goog-upload-command")
        if command == "start":
            return self._start_resumable(http_request)
        upload = self._open_uploads.pop(http_request.query.get("upload_id", ""), None)
        if command not in ("upload", "upload, finalize") or upload is None:
            raise HttpError(400, "an upload begins with `start` and ends with `upload, finalize`")
        if http_request.headers.get("x-goog-upload-offset") != str(len(upload.content)):
            raise HttpError(400, f"x-goog-upload-offset: {len(upload.content)} bytes are there")
        content = upload.content + http_request.body
        if command == "upload":
            self._open_uploads[http_request.query["upload_id"]] = msgspec.structs.replace(upload, content=content)
            return ResponsePlan(status=200, headers={"x-goog-upload-status": "active"}, reads=[])
        if len(content) != upload.size:
            raise HttpError(400, f"received {len(content)} bytes instead of the declared {upload.size}")
        self._created += 1
        uri = f"{_origin(http_request)}/v1beta/files/f{self._created:011d}"
        self.files[uri] = stored = StoredFile(
            file_id=uri,
            api="gemini",
            filename=upload.filename,
            media_type=upload.media_type,
            size=upload.size,
            sha256=sha256(content).hexdigest(),
            beginning=content[:_KEPT_BYTES],
        )
        self._polls_until_active[uri] = self.processing
        return _json({"file": self._gemini_file(stored)}, {"x-goog-upload-status": "final"})

    def _start_resumable(self, http_request: HttpRequest) -> ResponsePlan:
        headers = http_request.headers
        described = decode_as(msgspec.json.decode(http_request.body or b"{}"), _Description)
        upload_id = f"u{len(self._open_uploads)}-{self._created}-{time.monotonic_ns()}"
        self._open_uploads[upload_id] = _OpenUpload(
            described.file.display_name,
            headers.get("x-goog-upload-header-content-type", ""),
            int(headers.get("x-goog-upload-header-content-length", "-1")),
        )
        url = f"{_origin(http_request)}/upload/v1beta/files?upload_id={upload_id}"
        return _json({}, {"x-goog-upload-url": url, "x-goog-upload-status": "active"})

    def _gemini_file(self, file: StoredFile) -> dict[str, object]:
        return {
            "name": file.file_id.partition("/v1beta/")[2],
            "displayName": file.filename,
            "mimeType": file.media_type,
            "sizeBytes": str(file.size),
            "expirationTime": datetime.fromtimestamp(time.time() + 48 * 3600, UTC).isoformat(),
            "uri": file.file_id,
            "state": "PROCESSING" if self._polls_until_active[file.file_id] > 0 else "ACTIVE",
        }


def _mock_api_of(http_request: HttpRequest) -> MockApi | None:
    """The API whose file API this request is for; None for any other request."""
    if http_request.path == FILES or _OTHER_FILE.fullmatch(http_request.path):
        return anthropic.mock_api if "anthropic-version" in http_request.headers else openai_chat.mock_api
    return (
        gemini.mock_api
        if http_request.path == _GEMINI_FILES
        or _GEMINI_UPLOAD.fullmatch(http_request.path)
        or _GEMINI_FILE.fullmatch(http_request.path)
        else None
    )


def _vendor(api: ApiName) -> str:
    """The vendor of an API; the APIs of one vendor share their files."""
    return api.partition("-")[0]


def _parts(http_request: HttpRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """The field `file` of a form, and its others. Raises Rejected."""
    fields = read_form(http_request.headers.get("content-type", ""), http_request.body)
    file = fields.pop("file", None)
    if not isinstance(file, dict):
        raise HttpError(400, "file: field required")
    return cast("dict[str, Any]", file), fields


def _file_ids(value: object) -> Iterator[str]:
    """The file ids in a request's body, at any depth."""
    match value:
        case dict():
            for key, inner in cast("dict[str, object]", value).items():
                if key in ("file_id", "fileUri", "file_uri") and isinstance(inner, str):  # Google takes both spellings
                    if key == "file_id" or "/v1beta/files/" in inner:
                        yield inner
                else:
                    yield from _file_ids(inner)
        case list():
            for inner in cast("list[object]", value):
                yield from _file_ids(inner)
        case _:
            pass


def _anthropic(file: StoredFile) -> dict[str, object]:
    described: dict[str, object] = {
        "id": file.file_id,
        "type": "file",
        "filename": file.filename,
        "downloadable": False,
    }
    if seconds := file.fields.get("expires_in_seconds"):
        described["expires_at"] = datetime.fromtimestamp(time.time() + int(seconds), UTC).isoformat()
    created = datetime.fromtimestamp(CREATED, UTC).isoformat()
    return described | {"mime_type": file.media_type, "size_bytes": file.size, "created_at": created}


def _openai(file: StoredFile) -> dict[str, object]:
    described: dict[str, object] = {"id": file.file_id, "object": "file", "filename": file.filename, "bytes": file.size}
    if seconds := file.fields.get("expires_after[seconds]"):
        described["expires_at"] = round(time.time()) + int(seconds)
    return described | {"created_at": CREATED, "purpose": file.fields["purpose"], "status": "processed"}


def _origin(http_request: HttpRequest) -> str:
    return f"http://{http_request.headers['host']}"


def _json(body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> ResponsePlan:
    return ResponsePlan(
        status=200, headers={"content-type": "application/json", **(headers or {})}, reads=[_encode(body)]
    )

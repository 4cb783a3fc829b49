"""Gemini's Files API: https://ai.google.dev/gemini-api/docs/files and https://ai.google.dev/api/files.

A resumable upload: the first call declares the file and returns a URL, the second sends the content there. Video is
processed before a request can refer to it. Limits: 2 GB per file, 20 GB per project; files always live for 48 hours.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

import msgspec

from tokenbus.errors import Malformed
from tokenbus.providers.file_api import FileApi, FileCall, FileToUpload, Kind, ProviderFile, Upload
from tokenbus.providers.response.json_decode import read

MAX_FILE_BYTES = 2 * 10**9
POLLS = 20
"""How often to poll a file that is being processed: about a minute and a half in total."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_NAME = re.compile(r"files/[A-Za-z0-9-]{1,64}")


class _File(msgspec.Struct, rename="camel"):
    name: str
    uri: str
    state: Literal["STATE_UNSPECIFIED", "PROCESSING", "ACTIVE", "FAILED"] = "ACTIVE"
    expiration_time: datetime | None = None


class _Uploaded(msgspec.Struct):
    file: _File


_uploaded = msgspec.json.Decoder(_Uploaded)
_file = msgspec.json.Decoder(_File)


class GeminiFiles:
    """Files of any media type; the request's own limits decide what a model accepts."""

    max_bytes = MAX_FILE_BYTES

    def takes(self, kind: Kind, media_type: str) -> bool:
        """See `FileApi.takes`."""
        return True

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
        """See `FileApi.upload`."""
        before, _, version = base_path.rpartition("/")
        named = {
            "x-goog-upload-protocol": "resumable",
            "x-goog-upload-command": "start",
            "x-goog-upload-header-content-length": str(file.size),
            "x-goog-upload-header-content-type": file.media_type,
            "content-type": "application/json",
        }
        begin = msgspec.json.encode({"file": {"displayName": file.name}})
        begun = yield FileCall(path=f"{before}/upload/{version}/files", headers=named, body=begin)
        url = begun.headers.get("x-goog-upload-url")
        if not url or not url.startswith(("https://", "http://")):
            raise Malformed("file", "the answer has no upload URL")
        whole = {"x-goog-upload-command": "upload, finalize", "x-goog-upload-offset": "0"}
        answer = yield FileCall(path=url, headers=whole, body=content)
        made = read(_uploaded, answer.body, "file").file
        if not _NAME.fullmatch(made.name):
            raise Malformed("file.name", f"{made.name[:80]!r} is not a file name")
        pause_s = _FIRST_PAUSE_S
        for _ in range(POLLS):
            if made.state != "PROCESSING":
                break
            answer = yield FileCall(method="GET", path=f"{base_path}/{made.name}", pause_s=pause_s)
            made = read(_file, answer.body, "file")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if made.state not in ("ACTIVE", "STATE_UNSPECIFIED"):
            raise Malformed("file.state", f"the file is {made.state}")
        expires = made.expiration_time
        return ProviderFile(file_id=made.uri, expires_at=expires.timestamp() if expires else None)


files: FileApi = GeminiFiles()

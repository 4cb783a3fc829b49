"""Anthropic's Files API: https://platform.claude.com/docs/en/build-with-claude/files.

One call with a form. We send the beta header with uploads and with requests that name a file; the newest SDK no longer
sends it but still knows it. A file lives until it is deleted or for `expires_in_seconds` (one hour to 90 days).
Anthropic's Python SDK 2.11 has that field (`FileUploadParams`); the guide above does not yet.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from tokenbus.providers.file_api import FileApi, FileCall, FileToUpload, Kind, ProviderFile, Upload, bounded_life
from tokenbus.providers.request.multipart import File, form
from tokenbus.providers.response.json_decode import read

API_VERSION = "2023-06-01"
FILES_BETA = "files-api-2025-04-14"
MAX_FILE_BYTES = 500 * 2**20

_HOUR_S = 3_600
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")


class _Metadata(msgspec.Struct):
    id: str
    expires_at: datetime | None = None


_metadata = msgspec.json.Decoder(_Metadata)


class AnthropicFiles:
    """Images and PDFs. Text documents are sent inline."""

    max_bytes = MAX_FILE_BYTES

    def takes(self, kind: Kind, media_type: str) -> bool:
        """See `FileApi.takes`."""
        return media_type in _IMAGES if kind == "image" else media_type == "application/pdf"

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
        """See `FileApi.upload`."""
        fields = {"expires_in_seconds": bounded_life(file.keep_s, _HOUR_S, 90 * 24 * _HOUR_S)}
        content_type, body = form(fields, [File("file", file.name, file.media_type, content)])
        headers = {"content-type": content_type, "anthropic-version": API_VERSION, "anthropic-beta": FILES_BETA}
        answer = yield FileCall(path=f"{base_path}/v1/files", headers=headers, body=body)
        made = read(_metadata, answer.body, "file")
        return ProviderFile(file_id=made.id, expires_at=made.expires_at.timestamp() if made.expires_at else None)


files: FileApi = AnthropicFiles()

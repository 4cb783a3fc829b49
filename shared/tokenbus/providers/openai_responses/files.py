"""OpenAI's Files API: https://developers.openai.com/api/reference/resources/files/methods/create.

One call with a form. Up to 512 MB per file; the request's own limits decide how much a model accepts. A file lives
until it is deleted or for `expires_after` (one hour to 30 days). Purposes: `vision` for images, `user_data` for
`input_file` (https://developers.openai.com/api/docs/guides/images-vision, …/guides/file-inputs).
"""

from __future__ import annotations

import msgspec

from tokenbus.providers.file_api import FileApi, FileCall, FileToUpload, Kind, ProviderFile, Upload, bounded_life
from tokenbus.providers.request.multipart import File, form
from tokenbus.providers.response.json_decode import read

MAX_FILE_BYTES = 512 * 10**6

_HOUR_S = 3_600


class _File(msgspec.Struct):
    id: str
    expires_at: int | None = None


_file = msgspec.json.Decoder(_File)


class OpenAIFiles:
    """``images``: whether a request can refer to an image by id. Chat Completions cannot: `image_url` needs a URL."""

    max_bytes = MAX_FILE_BYTES

    def __init__(self, *, images: bool) -> None:
        self._images = images

    def takes(self, kind: Kind, media_type: str) -> bool:
        return kind == "document" or self._images

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
        seconds = bounded_life(file.keep_s, _HOUR_S, 30 * 24 * _HOUR_S)
        fields = {
            "purpose": "vision" if file.kind == "image" else "user_data",
            "expires_after": {"anchor": "created_at", "seconds": seconds},
        }
        content_type, body = form(fields, [File("file", file.name, file.media_type, content)])
        answer = yield FileCall(path=f"{base_path}/files", headers={"content-type": content_type}, body=body)
        made = read(_file, answer.body, "file")
        return ProviderFile(file_id=made.id, expires_at=made.expires_at)


files: FileApi = OpenAIFiles(images=True)
chat_files: FileApi = OpenAIFiles(images=False)

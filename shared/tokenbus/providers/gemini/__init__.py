"""Google's Gemini API: generateContent and streamGenerateContent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events.frames import ImagesRequested
from tokenbus.events.quirks import begins_with
from tokenbus.events.requests import Generate, Message, Mode, TextPart
from tokenbus.providers.api import ApiName, Built, Format, Provider, Quirks
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileApi, FileCall, FileToUpload, Kind, ProviderFile, Upload
from tokenbus.providers.gemini.contents import Contents
from tokenbus.providers.gemini.request import build, built, generation_of, max_stops
from tokenbus.providers.gemini.stream import GeminiDecoder
from tokenbus.providers.media import ANY, MIB, MediaLimits
from tokenbus.providers.request.conversation import Spoken
from tokenbus.providers.request.images import images_asked
from tokenbus.providers.request.participants import end_of_turn, options_of, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe
from tokenbus.providers.response.json_decode import read
from tokenbus.providers.response.sse import MAX_IMAGE_EVENT_BYTES

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
    """Files of any media type, which live for 48 hours: https://ai.google.dev/gemini-api/docs/files.

    A resumable upload: the first call declares the file and returns a URL, the second sends the content there. Video is
    processed before a request can refer to it. Limits: 2 GB per file, 20 GB per project.
    """

    max_bytes = MAX_FILE_BYTES

    def takes(self, kind: Kind, media_type: str) -> bool:
        return True

    def upload(self, file: FileToUpload, content: bytes, base_path: str) -> Upload:
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


END_OF_TURN = "<|eot|>"
"""The token that ends a message."""


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field.

    Newer models reject a request that ends in their own turn (unless listed in `Quirks.models_continuing`). They get
    the whole text as a user message, which ends in the model's name. Thinking is written into the text, so the API's
    own thinking options are not set.
    """
    token = end_of_turn(request, quirks, END_OF_TURN)
    transcript = transcribe(request, history, token)
    continues = begins_with(request.model, quirks.models_continuing)
    contents = Contents(sign_calls=False)
    if continues or transcript.before or options_of(request).first_user_message is not None:
        contents.add(opening_of(request, transcript))
    contents.add(Spoken("assistant" if continues else "user", [TextPart(text=transcript.text)], "messages"))
    body: dict[str, object] = {"contents": contents.turns}
    if system := system_text(request):
        body["systemInstruction"] = {"parts": [{"text": system}]}
    stop = provider_stops(request, token, max_stops(quirks))
    adapted = msgspec.structs.replace(request, thinking=None, stop=stop)
    if generation := generation_of(adapted, quirks):
        body["generationConfig"] = generation
    return built(body, request, transcript.notes)


class Gemini(ProviderBase):
    """The Gemini API as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "gemini"
    decodes = GeminiDecoder
    event_bytes = MAX_IMAGE_EVENT_BYTES
    key_header: tuple[str, str] = ("x-goog-api-key", "{}")
    default_base_url = "https://generativelanguage.googleapis.com/v1beta"
    default_key_env = "GEMINI_API_KEY"
    # Calls, images and the end of the response. No byte pattern marks the start or end of a text.
    urgent: tuple[bytes, ...] = (b'"functionCall"', b'"inlineData"', b'"finishReason"', b'"blockReason"', b'"error"')
    files: FileApi | None = files
    last: tuple[bytes, ...] = (b'data:{"error":{"',)
    image_keys: re.Pattern[bytes] | None = re.compile(
        rb'"mimeType"\s{0,32}:\s{0,32}"image/[a-z0-9.+-]{1,40}"\s{0,32},\s{0,32}"data"\s{0,32}:\s{0,32}"'
    )
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}
    # https://ai.google.dev/gemini-api/docs/file-input-methods, "Input method comparison": 100 MB per request (20 MB
    # until January 2026), 50 MB per PDF, 2 GB through the File API; …/image-understanding: five types, 3,600 images.
    # Audio and video count as documents here: the API accepts many types of them.
    media = MediaLimits(
        image_types=("image/png", "image/jpeg", "image/webp", "image/heic", "image/heif"),
        document_types=ANY,
        document_bytes=2 * 10**9,
        pdf_bytes=50 * MIB,
        images=3600,
        request_bytes=100 * MIB,
    )
    makes_images = True
    output_has_reasoning = False
    end_of_turn = END_OF_TURN
    takes_path = False
    options = frozenset({"json_object", "seed", "top_k", "frequency_penalty", "presence_penalty"})

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        return begins_with(request.model, quirks.models_continuing)

    def images_asked(self, request: Generate) -> ImagesRequested:
        return images_asked(request, own_model=True)


provider: Provider = Gemini()

"""OpenAI's Images API: one prompt, with or without images to edit, answered with images.

Source: "Images" and "Image streaming" of the OpenAI API reference; edits come as a form with files, or as JSON with
references.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider import openai_chat
from tokenbus_services.mock_provider.provider_api import CREATED
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import Asked, Refused, RequestOptions, Said, read_as

_encode = msgspec.json.Encoder().encode

Json = dict[str, object]


class _Request(msgspec.Struct):
    model: str
    prompt: str
    stream: bool | None = False
    partial_images: int | None = 0
    size: str = "1024x1024"
    quality: str = "high"
    background: str = "opaque"


class OpenAIImages:
    """The endpoints for generations and edits."""

    name: ApiName = "openai-images"
    route = re.compile(r"/v1/images/(generations|edits)")

    def hear(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> RequestOptions:
        request = _read(body)
        if route[1] == "generations" and _edits(body):
            raise Refused(400, f"Unknown parameter: {_edits(body)!r}.")
        if route[1] == "edits" and not _edits(body):
            raise Refused(400, "Missing required parameter: 'image'.")
        said = [(Said(by="user", text=request.prompt),)]
        return RequestOptions(model=request.model, stream=bool(request.stream), history="prompt", said=said)

    def error(self, status: int, message: str) -> bytes:
        return openai_chat.dialect.error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode({"type": "error", **openai_chat.error_object(status, message)})

    def stream(self, reply: Reply, asked: Asked) -> bytes:
        events: list[Json] = []
        form = _form(reply, asked)
        kind = "image_edit" if _edits(asked.body) else "image_generation"
        for picture in reply.pictures:
            for index, preview in enumerate(picture.previews[: _read(asked.body).partial_images or 0]):
                shown: Json = {"type": f"{kind}.partial_image", "partial_image_index": index}
                events.append({**shown, **form, "b64_json": b64encode(preview).decode()})
            made: Json = {"type": f"{kind}.completed", "b64_json": b64encode(picture.data).decode()}
            events.append({**made, **form, "usage": _usage(reply)})
        return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), _encode(e)) for e in events)

    def body(self, reply: Reply, asked: Asked) -> bytes:
        form = _form(reply, asked)
        data = [{"b64_json": b64encode(picture.data).decode()} for picture in reply.pictures]
        return _encode({"created": CREATED, "data": data, **form, "usage": _usage(reply)})


dialect = OpenAIImages()


def _read(body: Mapping[str, Any]) -> _Request:
    """Raises Refused. All fields of a form are texts."""
    return read_as(body, _Request, strict=False)


def _edits(body: Mapping[str, Any]) -> str:
    """The field with the images to edit, if there is one."""
    return next((field for field in ("image", "image[]", "images") if body.get(field)), "")


def _form(reply: Reply, asked: Asked) -> Json:
    """Request fields that every event repeats."""
    if not reply.pictures or reply.text or reply.tool_calls:
        raise Refused(501, "the Images API answers only with images")
    request = _read(asked.body)
    return {
        "created_at": CREATED,
        "size": request.size,
        "quality": request.quality,
        "background": request.background,
        "output_format": reply.pictures[0].media_type.removeprefix("image/"),
    }


def _usage(reply: Reply) -> Json:
    usage = reply.counted
    given, made = usage.input or 0, usage.output or 0
    details = {"text_tokens": given, "image_tokens": 0}
    return {"input_tokens": given, "output_tokens": made, "total_tokens": given + made, "input_tokens_details": details}

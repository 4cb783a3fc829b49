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
from tokenbus_services.mock_provider.apis import openai_chat
from tokenbus_services.mock_provider.apis.provider_api import CREATED
from tokenbus_services.mock_provider.reply import Reply
from tokenbus_services.mock_provider.request import HistoryItem, HttpError, ModelRequest, ParsedBody, decode_as

_encode = msgspec.json.Encoder().encode

Json = dict[str, object]


class _Request(msgspec.Struct):
    model: str
    prompt: str = ""
    stream: bool | None = False
    partial_images: int | None = 0
    size: str = "1024x1024"
    quality: str = "high"
    background: str = "opaque"


class MockOpenAIImages:
    """The endpoints for generations, edits and variations."""

    name: ApiName = "openai-images"
    route = re.compile(r"/v1/images/(generations|edits|variations)")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        request = _read(body)
        if route[1] == "generations" and _edits(body):
            raise HttpError(400, f"Unknown parameter: {_edits(body)!r}.")
        if route[1] != "generations" and not _edits(body):
            raise HttpError(400, "Missing required parameter: 'image'.")
        if route[1] != "variations" and not request.prompt:
            raise HttpError(400, "Missing required parameter: 'prompt'.")
        history = [(HistoryItem(role="user", text=request.prompt),)]
        return ParsedBody(model=request.model, stream=bool(request.stream), history_field="prompt", messages=history)

    def error(self, status: int, message: str) -> bytes:
        return openai_chat.mock_api.error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode({"type": "error", **openai_chat.error_object(status, message)})

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        events: list[Json] = []
        form = _form(reply, request)
        kind = "image_edit" if _edits(request.body) else "image_generation"
        for picture in reply.pictures:
            for index, preview in enumerate(picture.previews[: _read(request.body).partial_images or 0]):
                shown: Json = {"type": f"{kind}.partial_image", "partial_image_index": index}
                events.append({**shown, **form, "b64_json": b64encode(preview).decode()})
            made: Json = {"type": f"{kind}.completed", "b64_json": b64encode(picture.data).decode()}
            events.append({**made, **form, "usage": _usage(reply)})
        return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), _encode(e)) for e in events)

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        form = _form(reply, request)
        data = [{"b64_json": b64encode(picture.data).decode()} for picture in reply.pictures]
        return _encode({"created": CREATED, "data": data, **form, "usage": _usage(reply)})


mock_api = MockOpenAIImages()


def _read(body: Mapping[str, Any]) -> _Request:
    """Raises Rejected. All fields of a form are texts."""
    return decode_as(body, _Request, strict=False)


def _edits(body: Mapping[str, Any]) -> str:
    return next((field for field in ("image", "image[]", "images") if body.get(field)), "")


def _form(reply: Reply, request: ModelRequest) -> Json:
    """Request fields that every event repeats."""
    if not reply.pictures or reply.text or reply.tool_calls:
        raise HttpError(501, "the Images API answers only with images")
    body = _read(request.body)
    return {
        "created_at": CREATED,
        "size": body.size,
        "quality": body.quality,
        "background": body.background,
        "output_format": reply.pictures[0].media_type.removeprefix("image/"),
    }


def _usage(reply: Reply) -> Json:
    usage = reply.reported_usage
    given, made = usage.input or 0, usage.output or 0
    details = {"text_tokens": given, "image_tokens": 0}
    return {"input_tokens": given, "output_tokens": made, "total_tokens": given + made, "input_tokens_details": details}

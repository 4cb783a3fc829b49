"""OpenAI's Images API: one prompt, answered with images.

Source: "Images" and "Image streaming" of the OpenAI API reference.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.replay import openai_chat
from tokenbus_services.replay.asked import Asked, Heard, Refused, Said, read_as
from tokenbus_services.replay.dialect import CREATED
from tokenbus_services.replay.reply import Reply

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
    """The generations endpoint."""

    name: ApiName = "openai-images"
    route = re.compile(r"/v1/images/generations")

    def hear(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> Heard:
        request = read_as(body, _Request)
        said = [(Said(by="user", text=request.prompt),)]
        return Heard(model=request.model, stream=bool(request.stream), history="prompt", said=said)

    def error(self, status: int, message: str) -> bytes:
        return openai_chat.dialect.error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode({"type": "error", **openai_chat.error_object(status, message)})

    def stream(self, reply: Reply, asked: Asked) -> bytes:
        events: list[Json] = []
        form = _form(reply, asked)
        for picture in reply.pictures:
            for index, preview in enumerate(picture.previews[: read_as(asked.body, _Request).partial_images or 0]):
                shown: Json = {"type": "image_generation.partial_image", "partial_image_index": index}
                events.append({**shown, **form, "b64_json": b64encode(preview).decode()})
            made: Json = {"type": "image_generation.completed", "b64_json": b64encode(picture.data).decode()}
            events.append({**made, **form, "usage": _usage(reply)})
        return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), _encode(e)) for e in events)

    def body(self, reply: Reply, asked: Asked) -> bytes:
        form = _form(reply, asked)
        data = [{"b64_json": b64encode(picture.data).decode()} for picture in reply.pictures]
        return _encode({"created": CREATED, "data": data, **form, "usage": _usage(reply)})


dialect = OpenAIImages()


def _form(reply: Reply, asked: Asked) -> Json:
    """What every event repeats of the request."""
    if not reply.pictures or reply.text or reply.tool_calls:
        raise Refused(501, "the Images API answers with pictures alone")
    request = read_as(asked.body, _Request)
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

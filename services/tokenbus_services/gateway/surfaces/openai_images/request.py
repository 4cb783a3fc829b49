"""A request of the Images API as one of the bus: https://platform.openai.com/docs/api-reference/images. Pure."""

from __future__ import annotations

import re
from typing import Any, cast

from tokenbus.events.requests import ImageOptions, Message
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest

MAX_IMAGES = 10
MAX_PREVIEWS = 3
_WORD = re.compile(r"[A-Za-z0-9:._-]{1,64}")


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    ask = SurfaceRequest(asked, rules, body, model=name, stream=stream, speaks="openai-images")
    prompt = body.needed("prompt", body.text("prompt"))
    body.only("response_format", "b64_json", why="with another value than 'b64_json' is not supported by this gateway")
    body.only("moderation", "auto")
    body.only("output_compression", 100)
    if ask.model.api != "openai-images":
        body.only("n", 1, why="above 1 is not supported by this provider")
    images = ImageOptions(
        size=_word(body, "size"),
        quality=_word(body, "quality"),
        format=cast("Any", body.one_of("output_format", ("png", "jpeg", "webp"))),
        background=cast("Any", body.one_of("background", ("transparent", "opaque", "auto"))),
        count=body.whole("n", least=1, most=MAX_IMAGES) or 1,
        previews=body.whole("partial_images", most=MAX_PREVIEWS) or 0,
        deliver="base64",
    )
    if images.previews and not stream:
        raise invalid("partial_images", "is for streams only")
    user = ask.optional("user_id", body, "user", body.text, "")
    safety = ask.optional("user_id", body, "safety_identifier", body.text, "")
    fields: Json = {
        "messages": [Message(role="user", content=prompt)],
        "images": images,
        "user_id": safety or user or None,
    }
    return ask.translated(fields)


def _word(body: Fields, name: str) -> str | None:
    value = body.text(name)
    if value is not None and not _WORD.fullmatch(value):
        raise invalid(body.path(name), "must be a word of at most 64 letters, digits and ':._-'")
    return value

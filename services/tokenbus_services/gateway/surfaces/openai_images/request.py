"""A request of the Images API as one of the bus: https://platform.openai.com/docs/api-reference/images. Pure."""

from __future__ import annotations

import re
from typing import Any, cast

from tokenbus.events.requests import ImageOptions, Message
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.answering import echo_of, generate_of, options_of, tool_fields
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import extension
from tokenbus_services.gateway.surfaces.fields import Fields, json_body

MAX_IMAGES = 10
MAX_PREVIEWS = 3
_WORD = re.compile(r"[A-Za-z0-9:._-]{1,64}")


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate a request. Raises Refusal."""
    body = Fields(json_body(request.body), drop=rules.drop_unsupported)
    asked = extension(body, request.headers, rules)
    name = body.needed("model", body.text("model"))
    model = rules.models.resolve(name)
    prompt = body.needed("prompt", body.text("prompt"))
    stream = body.flag("stream") or False
    body.only("response_format", "b64_json", why="with another value than 'b64_json' is not supported by this gateway")
    body.only("moderation", "auto")
    body.only("output_compression", 100)
    if model.api != "openai-images":
        body.only("n", 1, why="above 1 is not supported by this provider")
    images = ImageOptions(
        size=_word(body, "size"),
        quality=_word(body, "quality"),
        format=cast("Any", body.one_of("output_format", ("png", "jpeg", "webp"))),
        background=cast("Any", body.one_of("background", ("transparent", "opaque", "auto"))),
        count=_bounded(body, "n", MAX_IMAGES, least=1) or 1,
        previews=_bounded(body, "partial_images", MAX_PREVIEWS) or 0,
        deliver="base64",
    )
    if images.previews and not stream:
        raise invalid("partial_images", "is for streams only")
    if "user_id" not in options_of(model, rules.models):
        body.refuse("is not supported by this provider", "user", "safety_identifier")
    user, safety = body.text("user"), body.text("safety_identifier")
    body.end()
    fields = {
        "messages": [Message(role="user", content=prompt)],
        "images": images,
        "user_id": safety or user or None,
        **tool_fields([], asked),
    }
    return Translated(
        generate=generate_of(model, asked, fields, {}, stream=stream),
        stream=stream,
        model=name,
        echo=echo_of(model, rules.models, asked),
        on_disconnect=asked.on_disconnect or "cancel",
    )


def _word(body: Fields, name: str) -> str | None:
    value = body.text(name)
    if value is not None and not _WORD.fullmatch(value):
        raise invalid(body.path(name), "must be a word of at most 64 letters, digits and ':._-'")
    return value


def _bounded(body: Fields, name: str, most: int, least: int = 0) -> int | None:
    value = body.whole(name, least)
    if value is not None and value > most:
        raise invalid(body.path(name), f"must be at most {most}")
    return value

"""Requests of the Images API: what each parameter becomes, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.rules import gateway_request, refused, translated
from tokenbus.events.requests import ImageOptions, Message
from tokenbus_services.gateway.models import ModelTable
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.gateway.surfaces.openai_images import OpenAIImagesSurface

SURFACE = OpenAIImagesSurface()


def allowed() -> TranslationRules:
    return TranslationRules(models=ModelTable({"images": "openai-images", "gemini": "gemini"}, {}))


def test_a_prompt_with_its_options_is_an_image_run() -> None:
    body: dict[str, Any] = {
        "model": "images/gpt-image-2", "prompt": "a cat", "n": 2, "size": "1024x1024", "quality": "low",
        "output_format": "webp", "background": "opaque", "stream": True, "partial_images": 2, "user": "u",
        "response_format": "b64_json", "moderation": "auto",
    }  # fmt: skip
    request = translated(SURFACE, gateway_request(body), allowed())
    assert request.stream
    assert request.generate.messages == [Message(role="user", content="a cat")]
    assert request.generate.user_id == "u"
    assert request.generate.images == ImageOptions(
        size="1024x1024", quality="low", format="webp", background="opaque", count=2, previews=2, deliver="base64"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"moderation": "low"}, "moderation"),
        ({"output_format": "svg"}, "output_format"),
        ({"quality": "as good as it gets"}, "quality"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_what_a_provider_lacks_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    asked_for = {"model": "gemini/flash-image", "prompt": "a cat", **body}
    assert refused(SURFACE, gateway_request(asked_for), allowed()).param == param

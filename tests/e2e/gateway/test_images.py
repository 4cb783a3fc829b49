"""The Images API through the gateway, with OpenAI's own Python client, its responses strictly validated."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Generator
from typing import Any

import openai
import pytest

from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Picture, Reply, Status, Turn

IMAGE, PREVIEW = b"\x89PNG the whole image", b"\x89PNG a preview"
CAT = Reply(pictures=(Picture(data=IMAGE, previews=(PREVIEW,)),))


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[gateway]\n") as running:
        running.model_says("cat", CAT)
        running.model_says("words", Reply(text="I cannot draw."))
        running.model_says("busy", Turn(says=CAT, first=(Status(status=503),)))
        running.model_says("refuses", Turn(says=CAT, fault=Status(status=400)))
        yield running


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[openai.OpenAI]:
    with openai.OpenAI(
        api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.mark.parametrize("model", ["openai-responses/cat", "gemini/cat", "openai-responses/busy"])
def test_an_image_is_made_by_each_provider_that_can(client: openai.OpenAI, model: str) -> None:
    made = client.images.generate(model=model, prompt="a cat", size="1024x1024")
    assert made.data
    assert [b64decode(image.b64_json or "") for image in made.data] == [IMAGE]
    assert made.output_format == "png"
    assert made.usage


def test_previews_come_before_the_image(client: openai.OpenAI) -> None:
    events = list(client.images.generate(model="openai-responses/cat", prompt="a cat", stream=True, partial_images=1))
    images = [(event.type, b64decode(event.b64_json)) for event in events]
    assert images == [("image_generation.partial_image", PREVIEW), ("image_generation.completed", IMAGE)]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": "url"}, "response_format"),
        ({"style": "vivid"}, "style"),
        ({"n": 11}, "n"),
        ({"partial_images": 1}, "partial_images"),
        ({"size": "as large as can be"}, "size"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(model="openai-responses/cat", prompt="a cat", **more)
    assert caught.value.param == param


def test_a_model_that_makes_no_image_is_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError):
        client.images.generate(model="openai-responses/words", prompt="a cat")
    with pytest.raises(openai.BadRequestError):
        client.images.generate(model="openai-responses/refuses", prompt="a cat")

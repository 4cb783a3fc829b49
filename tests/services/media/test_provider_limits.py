"""What media a provider takes, checked before the call."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import BUILT_IN, ApiName
from tokenbus.events.requests import Base64Source, DocumentPart, ImagePart, UrlSource
from tokenbus.providers import registry
from tokenbus_services.media.locate import Media
from tokenbus_services.media.provider_limits import check_media, check_size, limits_of
from tokenbus_services.settings import MediaSettings, Settings


def image(media_type: str) -> Media:
    return ImagePart(source=Base64Source(media_type=media_type, data=""))


def document(media_type: str) -> Media:
    return DocumentPart(source=Base64Source(media_type=media_type, data=""))


def refused(api: ApiName, *media: Media, size: int = 1, own: MediaSettings | None = None) -> RequestInvalid:
    with pytest.raises(RequestInvalid) as e:
        take(api, *media, size=size, own=own)
    return e.value


def take(api: ApiName, *media: Media, size: int = 1, own: MediaSettings | None = None) -> None:
    limits = limits_of(api, own or MediaSettings())
    placed = [(f"messages[{n}]", m) for n, m in enumerate(media)]
    check_media(limits, placed)
    for where, part in placed:
        check_size(limits, where, part, size)


def test_every_api_has_its_limits() -> None:
    assert all(registry.get(api).media.image_types for api in BUILT_IN)


@pytest.mark.parametrize("api", [api for api in BUILT_IN if api != "openai-images"])
def test_every_conversation_api_accepts_the_common_types_and_none_accepts_a_drawing(api: ApiName) -> None:
    take(
        api,
        image("image/png"),
        image("image/jpeg"),
        image("image/jpg"),
        image("IMAGE/WEBP"),
        document("application/pdf"),
    )
    error = refused(api, image("image/png"), image("image/svg+xml"))
    assert error.where == "messages[1].source.media_type"
    assert "image/svg+xml" in error.problem


def test_types_differ_as_the_documents_say() -> None:
    take("gemini", image("image/heic"), document("audio/mpeg"))
    take("openai-responses", document("text/csv"))
    take("anthropic", image("image/gif"), document("text/plain"))
    take("openai-images", image("image/webp"), image("image/jpg"))
    refused("openai-images", image("image/gif"))
    refused("openai-images", document("application/pdf"))
    refused("gemini", image("image/gif"))
    refused("openai-chat", document("text/plain"))
    refused("anthropic", document("audio/mpeg"))


def test_the_size_of_one_image_and_of_one_document() -> None:
    take("anthropic", image("image/png"), size=7 * 2**20)  # 10 MB of base64, where it was 5 in 2025
    assert refused("anthropic", image("image/png"), size=8 * 2**20).where == "messages[0]"
    take("openai-chat", image("image/png"), size=20 * 2**20)
    assert "52428800" in refused("gemini", document("application/pdf"), size=50 * 2**20 + 1).problem
    take("gemini", document("video/mp4"), size=60 * 2**20)


def test_the_number_of_images_counts_those_by_url() -> None:
    by_url = ImagePart(source=UrlSource(url="https://example.org/a.png"))
    own = MediaSettings(images=2)
    take("anthropic", by_url, document("application/pdf"), image("image/png"), own=own)
    assert refused("anthropic", by_url, image("image/png"), by_url, own=own).where == "messages[2]"


def test_media_settings_replace_the_limits_of_the_api() -> None:
    toml = '[providers.p]\napi = "anthropic"\nmedia = { image_types = ["image/*"], image_bytes = 9 }'
    own = msgspec.toml.decode(toml, type=Settings).providers["p"].media
    take("anthropic", image("image/svg+xml"), document("text/plain"), own=own)
    refused("anthropic", document("audio/mpeg"), own=own)
    refused("anthropic", image("image/png"), size=10, own=own)
    take("anthropic", image("x/y"), document("z"), own=MediaSettings(image_types=("*",), document_types=("*",)))


@pytest.mark.parametrize("bad", ["png", "image/", "image/*png", "Image/png", "image/png; q=1", "image/png\n"])
def test_a_type_that_is_none_is_an_error_of_the_settings(bad: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="image_types"):
        msgspec.convert({"image_types": [bad]}, MediaSettings)

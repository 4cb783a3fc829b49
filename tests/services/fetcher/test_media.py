"""Media of a turn: a request with blobs is the request with base64, whatever the API; and every way it can fail."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import pytest

from tests.services.fetcher.shelf import Shelf
from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobCorrupt, BlobUnauthorized, BlobUnavailable, RequestInvalid
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    DocumentPart,
    Generate,
    ImagePart,
    Message,
    Source,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus.events.vendor import ApiName
from tokenbus_services.fetcher.media import TurnMedia
from tokenbus_services.fetcher.media_cache import RecentBlobs
from tokenbus_services.fetcher.media_failed import MediaFailed
from tokenbus_services.fetcher.providers import Endpoint
from tokenbus_services.settings import MediaSettings, ProviderSettings, QuirkSettings

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 17
JPEG = b"\xff\xd8\xff" + b"camera" * 401
PDF = b"%PDF-1.7 " + b"page" * 300
TEXT = "Grüße, und mehr".encode() * 100
Mode = Literal["chat", "prefill"]
ROWS: list[tuple[ApiName, Mode]] = [
    ("anthropic", "chat"),
    ("anthropic", "prefill"),
    ("openai-chat", "chat"),
    ("openai-chat", "prefill"),
    ("openai-responses", "chat"),
    ("gemini", "chat"),
    ("gemini", "prefill"),
]


class Sources:
    """The same media in either form."""

    def __init__(self, shelf: Shelf | None) -> None:
        self._shelf = shelf

    def __call__(self, content: bytes, media_type: str) -> Source:
        if self._shelf is None:
            return Base64Source(media_type=media_type, data=b64encode(content).decode())
        return BlobSource(blob_id=self._shelf.put(content, media_type), media_type=media_type, size_bytes=len(content))


def conversation(sources: Sources, mode: Mode, *, text: bool) -> Generate:
    user: list[Any] = [
        TextPart(text="Look:"),
        ImagePart(source=sources(PNG, "image/png"), cache=True),
        ImagePart(source=UrlSource(url="https://example.org/a.png")),
        DocumentPart(source=sources(PDF, "application/pdf"), title="paper.pdf"),
        TextPart(text="And again:"),
        ImagePart(source=sources(PNG, "image/png")),
    ]
    if text:
        user.append(DocumentPart(source=sources(TEXT, "text/plain")))
    messages = [
        Message(role="user", content=user),
        Message(role="assistant", content=[ToolCallPart(tool_id="c1", tool_name="snap", arguments="{}")]),
        Message(
            role="tool",
            content=[
                ToolResultPart(
                    tool_id="c1", content=[TextPart(text="here"), ImagePart(source=sources(JPEG, "image/jpeg"))]
                )
            ],
        ),
        Message(role="user", content="What is it?"),
    ]
    return Generate(
        provider="p", model="m", mode=mode, messages=messages, participant="Claude" if mode == "prefill" else None
    )


def endpoint_of(api: ApiName, **media: Any) -> Endpoint:
    quirks = QuirkSettings(continues="message") if api == "openai-chat" else QuirkSettings()
    settings = ProviderSettings(api=api, api_key_env="", quirks=quirks, media=MediaSettings(**media))
    return Endpoint("p", settings, {})


async def sent(shelf: Shelf, endpoint: Endpoint, request: Generate, history: list[Message] | None = None) -> bytes:
    """The body as it goes out. Its length is what was told beforehand."""
    built, body = await TurnMedia(RecentBlobs(shelf, 0)).build(endpoint, request, history or [])
    if body is None:
        return built.call.body
    whole = b"".join([piece async for piece in body])
    assert len(whole) == body.size
    return whole


@pytest.mark.parametrize(("api", "mode"), ROWS)
async def test_a_request_with_blobs_is_the_request_with_base64(api: ApiName, mode: Mode) -> None:
    shelf, endpoint = Shelf(), endpoint_of(api)
    text = api != "openai-chat"  # which takes PDF alone
    by_blob = await sent(shelf, endpoint, conversation(Sources(shelf), mode, text=text))
    by_value = await sent(Shelf(), endpoint, conversation(Sources(None), mode, text=text))
    assert by_blob == by_value
    assert by_blob.count(b64encode(PNG)) == 2
    assert b64encode(JPEG) in by_blob


async def test_a_text_goes_to_anthropic_as_the_text_that_it_is() -> None:
    shelf = Shelf()
    body = await sent(shelf, endpoint_of("anthropic"), conversation(Sources(shelf), "chat", text=True))
    assert TEXT in body


async def test_media_in_the_runs_own_turns_are_found_too() -> None:
    shelf = Shelf()
    call = Message(role="assistant", content=[ToolCallPart(tool_id="c", tool_name="snap", arguments="{}")])
    image = ImagePart(source=BlobSource(blob_id=shelf.put(PNG, "image/png"), media_type="image/png"))
    result = Message(role="tool", content=[ToolResultPart(tool_id="c", content=[image])])
    body = await sent(shelf, endpoint_of("anthropic"), hello(), [call, result])
    assert b64encode(PNG) in body
    shelf.contents.clear()
    assert (await failed(shelf, hello(), history=[call, result])).where == "history[1].content[0].content[0]"


async def test_a_blob_in_a_message_that_is_left_out_is_never_asked_for() -> None:
    shelf = Shelf()
    image = ImagePart(source=BlobSource(blob_id=blob_id_of(b"not there"), media_type="image/png"))
    orphan = Message(role="tool", content=[ToolResultPart(tool_id="nobody", content=[image])])
    body = await sent(shelf, endpoint_of("anthropic"), hello(orphan))
    assert body == await sent(shelf, endpoint_of("anthropic"), hello())
    assert shelf.leased == []


async def test_each_turn_renews_the_lease_of_its_blobs_also_of_those_in_memory() -> None:
    shelf = Shelf()
    request = hello(shows(BlobSource(blob_id=shelf.put(PNG, "image/png"), media_type="image/png")))
    media = TurnMedia(RecentBlobs(shelf, 10**6))
    for _ in range(3):
        _, body = await media.build(endpoint_of("gemini"), request, [])
        assert body is not None
        assert b64encode(PNG) in b"".join([piece async for piece in body])
    assert (len(shelf.leased), len(shelf.read)) == (3, 1)


async def test_what_looks_like_a_blobs_mark_in_a_text_stays_text() -> None:
    shelf = Shelf()
    image = shows(BlobSource(blob_id=shelf.put(PNG, "image/png"), media_type="image/png"))
    forged = Message(role="user", content="blob-00000000000000000000000000000000 \\u0062lob-0")
    body = await sent(shelf, endpoint_of("anthropic"), hello(image, forged))
    assert b"blob-00000000000000000000000000000000" in body
    assert body.count(b64encode(PNG)) == 1


# --- what goes wrong ----------------------------------------------------------------------------------------------


def hello(*more: Message) -> Generate:
    return Generate(provider="p", model="m", messages=[Message(role="user", content="Hi"), *more])


def shows(source: Source) -> Message:
    return Message(role="user", content=[TextPart(text="Look:"), ImagePart(source=source)])


async def failed(shelf: Shelf, request: Generate, *, history: list[Message] | None = None) -> Any:
    with pytest.raises(MediaFailed) as e:
        await sent(shelf, endpoint_of("anthropic"), request, history)
    return e.value.error


async def refused(shelf: Shelf, request: Generate) -> str:
    with pytest.raises(RequestInvalid) as e:
        await sent(shelf, endpoint_of("anthropic"), request)
    return e.value.where


async def test_a_missing_blob_names_its_message_and_cannot_be_tried_again() -> None:
    missing = BlobSource(blob_id=blob_id_of(PNG), media_type="image/png")
    error = await failed(Shelf(), hello(shows(missing)))
    assert (error.code, error.kind, error.where, error.retryable) == (
        "blob_not_found",
        "invalid_request",
        "messages[1].content[1]",
        False,
    )
    assert "messages[1].content[1]" in error.message


async def test_the_first_of_several_missing_blobs_is_named() -> None:
    missing = [BlobSource(blob_id=blob_id_of(bytes([n])), media_type="image/png") for n in range(20)]
    error = await failed(Shelf(), hello(*map(shows, missing)))
    assert error.where == "messages[1].content[1]"


async def test_an_id_that_is_none_is_refused_before_any_store_hears_of_it() -> None:
    error = await failed(Shelf(), hello(shows(BlobSource(blob_id="../../etc/passwd", media_type="image/png"))))
    assert (error.code, error.kind, error.where) == ("blob_refused", "invalid_request", "messages[1].content[1]")


@pytest.mark.parametrize("stored", ["image/jpeg", "application/pdf", "text/html; charset=utf-8"])
async def test_a_blob_of_another_type_than_said_is_refused(stored: str) -> None:
    shelf = Shelf()
    source = BlobSource(blob_id=shelf.put(PNG, stored), media_type="image/png")
    assert await refused(shelf, hello(shows(source))) == "messages[1].content[1].source.media_type"


@pytest.mark.parametrize(
    ("stored", "said"),
    [("application/octet-stream", "image/png"), ("image/jpeg", "image/jpg"), ("image/PNG", "image/png")],
)
async def test_a_type_told_in_another_spelling_or_not_at_all_is_no_lie(stored: str, said: str) -> None:
    shelf = Shelf()
    source = BlobSource(blob_id=shelf.put(PNG, stored), media_type=said)
    assert b64encode(PNG) in await sent(shelf, endpoint_of("anthropic"), hello(shows(source)))


async def test_a_size_that_is_not_the_blobs_is_refused() -> None:
    shelf = Shelf()
    source = BlobSource(blob_id=shelf.put(PNG, "image/png"), media_type="image/png", size_bytes=3)
    assert await refused(shelf, hello(shows(source))) == "messages[1].content[1].source.size_bytes"


@pytest.mark.parametrize(
    ("failure", "kind", "retryable"),
    [
        (BlobUnavailable("blobs", "away"), "server", True),
        (BlobUnauthorized("blobs"), "auth", False),
        (BlobCorrupt(blob_id_of(PNG)), "internal", False),
    ],
)
async def test_a_store_that_fails_says_whether_another_try_may_help(failure: Any, kind: str, retryable: bool) -> None:
    shelf = Shelf()
    source = BlobSource(blob_id=shelf.put(PNG, "image/png"), media_type="image/png")
    shelf.failure = failure
    error = await failed(shelf, hello(shows(source)))
    assert (error.code, error.kind, error.retryable) == (failure.code, kind, retryable)


async def test_limits_hold_for_blobs_as_for_base64() -> None:
    shelf = Shelf()
    blob = BlobSource(blob_id=shelf.put(PNG, "image/png"), media_type="image/png")
    value = Base64Source(media_type="image/png", data=b64encode(PNG).decode())
    for source in (blob, value):
        with pytest.raises(RequestInvalid, match=f"{len(PNG)} bytes") as e:
            await sent(shelf, endpoint_of("anthropic", image_bytes=len(PNG) - 3), hello(shows(source)))
        assert e.value.where == "messages[1].content[1]"
        with pytest.raises(RequestInvalid, match="with its media the request has"):
            await sent(shelf, endpoint_of("anthropic", request_bytes=len(PNG)), hello(shows(source)))
    assert shelf.read == []

"""Media of a turn: a request with blobs equals the request with base64 for every API; and every failure."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import msgspec
import pytest

from tests.services.fetcher.blob_store import MemoryBlobs
from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobCorrupt, BlobUnauthorized, BlobUnavailable, RequestInvalid
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    DocumentPart,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    Source,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.media.locate import MediaFailed
from tokenbus_services.mock_provider.request import read_form
from tokenbus_services.settings import MediaSettings, ProviderSettings, QuirkSettings

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 17
MASKING = b"\x89PNG\r\n\x1a\n" + bytes(1003)
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

    def __init__(self, blob_store: MemoryBlobs | None) -> None:
        self._blob_store = blob_store

    def __call__(self, content: bytes, media_type: str) -> Source:
        if self._blob_store is None:
            return Base64Source(media_type=media_type, data=b64encode(content).decode())
        return BlobSource(
            blob_id=self._blob_store.put(content, media_type), media_type=media_type, size_bytes=len(content)
        )


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


async def sent(
    blob_store: MemoryBlobs, endpoint: Endpoint, request: Generate, history: list[Message] | None = None
) -> bytes:
    """The body as sent. Its length is the announced one."""
    built, body = await TurnMedia(RecentBlobs(blob_store, 0)).build(endpoint, request, history or [])
    if body is None:
        return built.call.body
    whole = b"".join([piece async for piece in body])
    assert len(whole) == body.size
    return whole


@pytest.mark.parametrize(("api", "mode"), ROWS)
async def test_a_request_with_blobs_is_the_request_with_base64(api: ApiName, mode: Mode) -> None:
    blob_store, endpoint = MemoryBlobs(), endpoint_of(api)
    text = api != "openai-chat"  # which takes PDF alone
    by_blob = await sent(blob_store, endpoint, conversation(Sources(blob_store), mode, text=text))
    by_value = await sent(MemoryBlobs(), endpoint, conversation(Sources(None), mode, text=text))
    assert by_blob == by_value
    assert by_blob.count(b64encode(PNG)) == 2
    assert b64encode(JPEG) in by_blob


def edit_of(sources: Sources, media_type: str = "image/png") -> Generate:
    """Two images to edit, one of them twice, with a mask."""
    images = [ImagePart(source=sources(content, media_type)) for content in (PNG, JPEG, PNG)]
    messages = [Message(role="user", content=[TextPart(text="As one."), *images])]
    mask = ImagePart(source=sources(MASKING, "image/png"))
    return Generate(provider="p", model="m", messages=messages, images=ImageOptions(mask=mask, previews=2))


async def test_blobs_are_in_a_form_as_the_files_that_they_are() -> None:
    async def form_of(blob_store: MemoryBlobs, request: Generate) -> dict[str, Any]:
        built, body = await TurnMedia(RecentBlobs(blob_store, 0)).build(endpoint_of("openai-images"), request, [])
        whole = built.call.body if body is None else b"".join([piece async for piece in body])
        assert len(whole) == (len(built.call.body) if body is None else body.size)
        return read_form(built.call.headers["content-type"], whole)

    blob_store = MemoryBlobs()
    by_blob = await form_of(blob_store, edit_of(Sources(blob_store)))
    assert by_blob == await form_of(MemoryBlobs(), edit_of(Sources(None)))
    assert [file["data"] for file in by_blob["image[]"]] == [PNG, JPEG, PNG]
    assert (by_blob["mask"]["data"], by_blob["partial_images"]) == (MASKING, "2")


async def test_blobs_together_with_an_image_url_are_base64_in_json() -> None:
    blob_store = MemoryBlobs()
    request = edit_of(Sources(blob_store))
    [message] = request.messages
    assert not isinstance(message.content, str)
    named = ImagePart(source=UrlSource(url="https://example.org/a.png"))
    request = msgspec.structs.replace(request, messages=[Message(role="user", content=[*message.content, named])])
    body = msgspec.json.decode(await sent(blob_store, endpoint_of("openai-images"), request))
    urls = [image["image_url"] for image in (*body["images"], body["mask"])]
    as_json = [f"data:image/png;base64,{b64encode(content).decode()}" for content in (PNG, JPEG, PNG, MASKING)]
    assert urls == [*as_json[:3], "https://example.org/a.png", as_json[3]]


async def test_a_mask_is_checked_as_every_image_and_not_counted_among_those_to_edit() -> None:
    blob_store = MemoryBlobs()
    await sent(blob_store, endpoint_of("openai-images", images=3), edit_of(Sources(blob_store)))
    with pytest.raises(RequestInvalid, match="2 images"):
        await sent(blob_store, endpoint_of("openai-images", images=2), edit_of(Sources(blob_store)))
    request = edit_of(Sources(blob_store))
    del blob_store.contents[blob_id_of(MASKING)]
    with pytest.raises(MediaFailed) as e:
        await sent(blob_store, endpoint_of("openai-images"), request)
    assert (e.value.error.code, e.value.error.where) == ("blob_not_found", "images.mask")


async def test_a_text_goes_to_anthropic_as_the_text_that_it_is() -> None:
    blob_store = MemoryBlobs()
    body = await sent(blob_store, endpoint_of("anthropic"), conversation(Sources(blob_store), "chat", text=True))
    assert TEXT in body


async def test_media_in_the_runs_own_turns_are_found_too() -> None:
    blob_store = MemoryBlobs()
    call = Message(role="assistant", content=[ToolCallPart(tool_id="c", tool_name="snap", arguments="{}")])
    image = ImagePart(source=BlobSource(blob_id=blob_store.put(PNG, "image/png"), media_type="image/png"))
    result = Message(role="tool", content=[ToolResultPart(tool_id="c", content=[image])])
    body = await sent(blob_store, endpoint_of("anthropic"), hello(), [call, result])
    assert b64encode(PNG) in body
    blob_store.failure = BlobUnavailable("blobs", "no connection")
    assert (await failed(blob_store, hello(), history=[call, result])).where == "history[1].content[0].content[0]"


async def test_a_blob_in_a_message_that_is_left_out_is_never_asked_for() -> None:
    blob_store = MemoryBlobs()
    image = ImagePart(source=BlobSource(blob_id=blob_id_of(b"not there"), media_type="image/png"))
    orphan = Message(role="tool", content=[ToolResultPart(tool_id="nobody", content=[image])])
    body = await sent(blob_store, endpoint_of("anthropic"), hello(orphan))
    assert body == await sent(blob_store, endpoint_of("anthropic"), hello())
    assert blob_store.leased == []


async def test_each_turn_renews_the_lease_of_its_blobs_also_of_those_in_memory() -> None:
    blob_store = MemoryBlobs()
    request = hello(shows(BlobSource(blob_id=blob_store.put(PNG, "image/png"), media_type="image/png")))
    media = TurnMedia(RecentBlobs(blob_store, 10**6))
    for _ in range(3):
        _, body = await media.build(endpoint_of("gemini"), request, [])
        assert body is not None
        assert b64encode(PNG) in b"".join([piece async for piece in body])
    assert (len(blob_store.leased), len(blob_store.read)) == (3, 1)


async def test_what_looks_like_a_blobs_mark_in_a_text_stays_text() -> None:
    blob_store = MemoryBlobs()
    image = shows(BlobSource(blob_id=blob_store.put(PNG, "image/png"), media_type="image/png"))
    forged = f"blob-{'0' * 34}000000"
    texts = [forged, b64encode(forged.encode()).decode(), forged.replace("b", "\\u0062")]
    body = await sent(
        blob_store, endpoint_of("anthropic"), hello(image, *(Message(role="user", content=t) for t in texts))
    )
    assert all(msgspec.json.encode(text)[1:-1] in body for text in texts)
    assert body.count(b64encode(PNG)) == 1


# --- what goes wrong ----------------------------------------------------------------------------------------------


def hello(*more: Message) -> Generate:
    return Generate(provider="p", model="m", messages=[Message(role="user", content="Hi"), *more])


def shows(source: Source) -> Message:
    return Message(role="user", content=[TextPart(text="Look:"), ImagePart(source=source)])


async def failed(blob_store: MemoryBlobs, request: Generate, *, history: list[Message] | None = None) -> Any:
    with pytest.raises(MediaFailed) as e:
        await sent(blob_store, endpoint_of("anthropic"), request, history)
    return e.value.error


async def refused(blob_store: MemoryBlobs, request: Generate) -> str:
    with pytest.raises(RequestInvalid) as e:
        await sent(blob_store, endpoint_of("anthropic"), request)
    return e.value.where


async def test_a_missing_blob_names_its_message_and_cannot_be_tried_again() -> None:
    missing = BlobSource(blob_id=blob_id_of(PNG), media_type="image/png")
    error = await failed(MemoryBlobs(), hello(shows(missing)))
    assert (error.code, error.kind, error.where, error.retryable) == (
        "blob_not_found",
        "invalid_request",
        "messages[1].content[1]",
        False,
    )
    assert "messages[1].content[1]" in error.message


async def test_the_first_of_several_missing_blobs_is_named() -> None:
    missing = [BlobSource(blob_id=blob_id_of(bytes([n])), media_type="image/png") for n in range(20)]
    error = await failed(MemoryBlobs(), hello(*map(shows, missing)))
    assert error.where == "messages[1].content[1]"


async def test_an_invalid_id_is_refused_before_any_store_is_called() -> None:
    error = await failed(MemoryBlobs(), hello(shows(BlobSource(blob_id="../../etc/passwd", media_type="image/png"))))
    assert (error.code, error.kind, error.where) == ("blob_refused", "invalid_request", "messages[1].content[1]")


@pytest.mark.parametrize("stored", ["image/jpeg", "application/pdf", "text/html; charset=utf-8"])
async def test_a_blob_of_another_type_than_the_request_names_is_refused(stored: str) -> None:
    blob_store = MemoryBlobs()
    source = BlobSource(blob_id=blob_store.put(PNG, stored), media_type="image/png")
    assert await refused(blob_store, hello(shows(source))) == "messages[1].content[1].source.media_type"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("application/octet-stream", "image/png"), ("image/jpeg", "image/jpg"), ("image/PNG", "image/png")],
)
async def test_a_media_type_in_another_spelling_or_missing_is_accepted(stored: str, expected: str) -> None:
    blob_store = MemoryBlobs()
    source = BlobSource(blob_id=blob_store.put(PNG, stored), media_type=expected)
    assert b64encode(PNG) in await sent(blob_store, endpoint_of("anthropic"), hello(shows(source)))


async def test_a_size_that_is_not_the_blobs_is_refused() -> None:
    blob_store = MemoryBlobs()
    source = BlobSource(blob_id=blob_store.put(PNG, "image/png"), media_type="image/png", size_bytes=3)
    assert await refused(blob_store, hello(shows(source))) == "messages[1].content[1].source.size_bytes"


@pytest.mark.parametrize(
    ("failure", "kind", "retryable"),
    [
        (BlobUnavailable("blobs", "away"), "server", True),
        (BlobUnauthorized("blobs"), "auth", False),
        (BlobCorrupt(blob_id_of(PNG)), "internal", False),
    ],
)
async def test_a_store_that_fails_says_whether_another_try_may_help(failure: Any, kind: str, retryable: bool) -> None:
    blob_store = MemoryBlobs()
    source = BlobSource(blob_id=blob_store.put(PNG, "image/png"), media_type="image/png")
    blob_store.failure = failure
    error = await failed(blob_store, hello(shows(source)))
    assert (error.code, error.kind, error.retryable) == (failure.code, kind, retryable)


async def test_limits_hold_for_blobs_as_for_base64() -> None:
    blob_store = MemoryBlobs()
    blob = BlobSource(blob_id=blob_store.put(PNG, "image/png"), media_type="image/png")
    value = Base64Source(media_type="image/png", data=b64encode(PNG).decode())
    for source in (blob, value):
        with pytest.raises(RequestInvalid, match=f"{len(PNG)} bytes") as e:
            await sent(blob_store, endpoint_of("anthropic", image_bytes=len(PNG) - 3), hello(shows(source)))
        assert e.value.where == "messages[1].content[1]"
        with pytest.raises(RequestInvalid, match="the request with its media has"):
            await sent(blob_store, endpoint_of("anthropic", request_bytes=len(PNG)), hello(shows(source)))
    assert blob_store.read == []

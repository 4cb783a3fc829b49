"""Images of tools and of the model, and opaque data in blobs: unsendable ones are left out, and the run continues."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import pytest

from tests.services.fetcher.blob_store import MemoryBlobs
from tests.services.fetcher.test_request_media import JPEG, PNG, endpoint_of
from tokenbus.errors import BlobUnavailable, RequestInvalid
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    ContentPart,
    Generate,
    ImagePart,
    Message,
    Source,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.providers.api import Built
from tokenbus_services.fetcher import request_media
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.intake import blob_offload as opaque_blobs
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.media.locate import MediaFailed

APIS: list[ApiName] = ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"]
HI = Message(role="user", content="Hi")


def inline(media_type: str, content: bytes = PNG) -> Base64Source:
    return Base64Source(media_type=media_type, data=b64encode(content).decode())


def drawn(*sources: Source, text: str = "") -> list[Message]:
    """A call and its result, with these images."""
    parts = [TextPart(text=text)] if text else []
    content = [*parts, *(ImagePart(source=source) for source in sources)]
    call = ToolCallPart(tool_id="c", tool_name="draw", arguments="{}")
    return [
        Message(role="assistant", content=[call]),
        Message(role="tool", content=[ToolResultPart(tool_id="c", content=content)]),
    ]


async def made(
    api: ApiName,
    request: list[Message],
    history: list[Message] | None = None,
    blob_store: MemoryBlobs | None = None,
    **media: Any,
) -> tuple[Built, str]:
    """The call, and its body with all blobs in it."""
    generate = Generate(provider="p", model="m", messages=request)
    blobs = TurnMedia(RecentBlobs(blob_store or MemoryBlobs(), 0))
    built, body = await blobs.build(endpoint_of(api, **media), generate, history or [])
    whole = built.call.body if body is None else b"".join([piece async for piece in body])
    msgspec.json.decode(whole)
    return built, whole.decode()


async def test_a_gif_of_a_tool_ends_no_run_of_gemini() -> None:
    built, body = await made("gemini", [HI], drawn(inline("image/gif"), text="a chart"))
    assert b64encode(PNG).decode() not in body
    assert "a chart" in body
    assert "[an image is left out here: this provider takes no image of type 'image/gif']" in body
    assert built.notes == (
        "history[1].content[0].content[1]: the image was left out: this provider takes no image of type 'image/gif'",
    )


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("media", "source"),
    [
        ({"image_types": ["image/png"]}, inline("image/jpeg", JPEG)),
        ({"image_types": []}, inline("image/jpeg", JPEG)),
        ({"image_bytes": len(JPEG) - 1}, inline("image/jpeg", JPEG)),
        ({"images": 0}, inline("image/jpeg", JPEG)),
    ],
    ids=["type", "none at all", "size", "number"],
)
async def test_what_a_vendors_own_table_does_not_take_of_a_tool_is_left_out(
    api: ApiName, media: dict[str, Any], source: Source
) -> None:
    for messages, history in (([HI, *drawn(source)], []), ([HI], drawn(source))):
        built, body = await made(api, messages, history, **media)
        assert b64encode(JPEG).decode() not in body
        assert "an image is left out here" in body
        assert len(built.notes) == 1
    with pytest.raises(RequestInvalid):
        await made(api, [Message(role="user", content=[ImagePart(source=source)])], **media)


async def test_of_too_many_images_the_oldest_of_tools_go() -> None:
    old, new = drawn(inline("image/png", b"old one")), drawn(inline("image/png", b"new one"))
    generate = Message(role="user", content=[ImagePart(source=inline("image/png", b"asked for"))])
    _, body = await made("openai-chat", [generate, *old, *new], images=2)
    shown = [name for name in (b"asked for", b"old one", b"new one") if b64encode(name).decode() in body]
    assert shown == [b"asked for", b"new one"]


@pytest.mark.parametrize("api", APIS)
async def test_a_tools_image_whose_blob_is_gone_is_left_out_and_those_beside_it_go(api: ApiName) -> None:
    blob_store = MemoryBlobs()
    there = BlobSource(blob_id=blob_store.put(JPEG, "image/jpeg"), media_type="image/jpeg", size_bytes=len(JPEG))
    gone = BlobSource(blob_id=f"sha256:{'0' * 64}", media_type="image/png", size_bytes=9)
    odd = BlobSource(blob_id=there.blob_id, media_type="image/jpeg", size_bytes=1)
    built, body = await made(api, [HI], drawn(gone, there, odd), blob_store)
    assert body.count(b64encode(JPEG).decode()) == 1
    assert [note.partition(": ")[2] for note in built.notes] == [
        "the image was left out: its blob is gone",
        f"the image was left out: the blob has {len(JPEG)} bytes, not 1",
    ]


async def test_a_users_image_whose_blob_is_gone_is_an_error_that_names_it() -> None:
    gone = ImagePart(source=BlobSource(blob_id=f"sha256:{'0' * 64}", media_type="image/png"))
    with pytest.raises(MediaFailed) as failed:
        await made("anthropic", [Message(role="user", content=[gone])])
    assert failed.value.error.where == "messages[0].content[0]"


@pytest.mark.parametrize("api", ["anthropic", "openai-chat"])
async def test_an_image_of_the_model_that_this_provider_does_not_take_is_left_out(api: ApiName) -> None:
    painted = Message(role="assistant", content=[ImagePart(source=inline("image/svg+xml")), TextPart(text="Here.")])
    built, body = await made(api, [HI, painted, HI])
    assert "Here." in body
    assert b64encode(PNG).decode() not in body
    assert len(built.notes) == 1


# --- opaque data in blobs -----------------------------------------------------------------------------------------


def thought(blob_id: str, api: str = "openai-responses") -> Message:
    parts: list[ContentPart] = [
        ThinkingPart(text="Hm", opaque={"api": api, "provider": "p"}, opaque_blobs={"encrypted": blob_id}),
        TextPart(text="Yes."),
    ]
    return Message(role="assistant", content=parts)


async def test_opaque_data_are_loaded_for_the_provider_that_they_are_of_alone() -> None:
    blob_store = MemoryBlobs()
    blob_id = blob_store.put(b"secret thoughts", "text/plain")
    _, body = await made("openai-responses", [HI, thought(blob_id), HI], blob_store=blob_store)
    assert '"encrypted_content":"secret thoughts"' in body
    assert blob_store.leased == [blob_id]
    blob_store.read.clear()
    built, body = await made("gemini", [HI, thought(blob_id), HI], blob_store=blob_store)
    assert "secret thoughts" not in body
    assert blob_store.read == []
    assert built.notes == ("messages[1]: thinking of p was left out: other providers do not accept it",)


async def test_opaque_data_that_are_gone_too_large_or_no_text_are_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blob_store = MemoryBlobs()
    large, bytes_ = blob_store.put(b"x" * 100, "text/plain"), blob_store.put(b"\xff\xfe", "text/plain")
    monkeypatch.setattr(opaque_blobs, "MOST_BYTES", 99)
    for blob_id in (f"sha256:{'0' * 64}", "no id at all", large, bytes_):
        built, body = await made("openai-responses", [HI, thought(blob_id), HI], blob_store=blob_store)
        assert "encrypted_content" not in body.replace("reasoning.encrypted_content", "")
        assert "messages[1].content[0].opaque_blobs.encrypted: left out" in built.notes[0]


async def test_a_short_outage_of_the_store_ends_the_attempt_as_retryable() -> None:
    blob_store = MemoryBlobs()
    blob_id = blob_store.put(b"secret thoughts", "text/plain")
    blob_store.failure = BlobUnavailable("blobs", "no connection")
    with pytest.raises(MediaFailed) as failed:
        await made("openai-responses", [HI, thought(blob_id), HI], blob_store=blob_store)
    assert failed.value.error.retryable


async def test_media_that_are_gone_and_cannot_be_left_out_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*_: Any, **__: Any) -> Any:
        raise request_media._Gone({"nowhere": "it is gone"})

    monkeypatch.setattr(TurnMedia, "_build", gone)
    with pytest.raises(RuntimeError, match="cannot be left out"):
        await made("anthropic", [HI])

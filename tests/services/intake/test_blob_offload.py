"""Media of accepted requests: large ones go to the blob store, and an unavailable store stops no request."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import msgspec
import pytest

from tests.services.fetcher.blob_store import MemoryBlobs
from tokenbus.blobs import blob_id_of, parse_media_type
from tokenbus.errors import BlobQuotaExceeded, BlobUnauthorized, BlobUnavailable, RequestInvalid
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    DocumentPart,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.intake.blob_offload import AWAY_S, MOST_BLOBS, TRIES, IntakeMedia
from tokenbus_services.media.blob_cache import RecentBlobs

THOUGHT = ThinkingPart(opaque_blobs={"encrypted": blob_id_of(b"thoughts")})
LARGE = bytes(range(256)) * 3
SMALL = b"small"


class CountingStore(MemoryBlobs):
    """Counts every call, failed ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    def _reach(self) -> None:
        self.questions += 1
        super()._reach()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def intake(blob_store: MemoryBlobs, clock: Clock | None = None) -> IntakeMedia:
    return IntakeMedia(RecentBlobs(blob_store, 0), inline_characters=len(b64encode(LARGE)) - 1, clock=clock or Clock())


def inline(content: bytes, media_type: str = "image/png") -> Base64Source:
    return Base64Source(media_type=media_type, data=b64encode(content).decode())


def request_with(*content: Any) -> Generate:
    return Generate(provider="p", model="m", messages=[Message(role="user", content=[TextPart(text="Look"), *content])])


async def test_large_data_in_any_field_becomes_a_reference_and_the_rest_is_unchanged() -> None:
    blob_store = MemoryBlobs()
    url = ImagePart(source=UrlSource(url="https://example.org/a.png"))
    request = request_with(
        ImagePart(source=inline(LARGE), cache=True),
        ImagePart(source=inline(SMALL)),
        url,
        DocumentPart(source=inline(LARGE, "application/pdf"), title="t"),
        ToolResultPart(tool_id="c", content=[TextPart(text="here"), ImagePart(source=inline(LARGE, "image/gif"))]),
    )
    moved = {"blob_id": blob_id_of(LARGE), "size_bytes": len(LARGE)}
    assert await intake(blob_store).offload(request) == request_with(
        ImagePart(source=BlobSource(media_type="image/png", **moved), cache=True),
        ImagePart(source=inline(SMALL)),
        url,
        DocumentPart(source=BlobSource(media_type="application/pdf", **moved), title="t"),
        ToolResultPart(
            tool_id="c",
            content=[TextPart(text="here"), ImagePart(source=BlobSource(media_type="image/gif", **moved))],
        ),
    )
    assert blob_store.contents[blob_id_of(LARGE)][0] == LARGE


async def test_a_mask_is_moved_and_leased_as_any_image() -> None:
    blob_store = MemoryBlobs()

    def masked(source: Any) -> Generate:
        return msgspec.structs.replace(request_with(), images=ImageOptions(mask=ImagePart(source=source), previews=1))

    stored = BlobSource(media_type="image/png", blob_id=blob_id_of(LARGE), size_bytes=len(LARGE))
    assert await intake(blob_store).offload(masked(inline(LARGE))) == masked(stored)
    blob_store.leased.clear()
    await intake(blob_store).offload(masked(stored))
    assert blob_store.leased == [stored.blob_id]


async def test_a_request_without_media_asks_no_store() -> None:
    blob_store = CountingStore()
    request = Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")])
    assert await intake(blob_store).offload(request) == request
    assert blob_store.questions == 0


async def test_a_blob_that_the_request_names_is_leased_and_a_missing_one_is_left_to_its_turn() -> None:
    blob_store = MemoryBlobs()
    there = BlobSource(blob_id=blob_store.put(LARGE, "image/png"), media_type="image/png")
    request = request_with(
        ImagePart(source=there),
        ImagePart(source=BlobSource(blob_id=blob_id_of(b"gone"), media_type="image/png")),
        ImagePart(source=BlobSource(blob_id="no id", media_type="image/png")),
    )
    assert await intake(blob_store).offload(request) == request
    assert blob_store.leased == [there.blob_id]


async def test_a_blob_is_leased_once_however_often_it_is_named_and_too_many_blobs_are_refused() -> None:
    blob_store = MemoryBlobs()
    images = [
        ImagePart(source=BlobSource(blob_id=blob_store.put(b"%d" % n, "image/png"), media_type="image/png"))
        for n in range(MOST_BLOBS + 1)
    ]
    media = intake(blob_store)
    await media.offload(request_with(*images[:3] * 400))
    assert len(blob_store.leased) == 3
    with pytest.raises(RequestInvalid) as e:
        await media.offload(request_with(*images))
    assert e.value.where == f"messages[0].content[{MOST_BLOBS + 1}]"


@pytest.mark.parametrize(
    ("source", "where"),
    [
        (Base64Source(media_type="image/png", data="A" * 2000 + "!"), "messages[0].content[1].source.data"),
        (Base64Source(media_type="image/png", data="é" * 2000), "messages[0].content[1].source.data"),
        (inline(LARGE, "no type"), "messages[0].content[1].source.media_type"),
        (inline(LARGE, "image/png\r\nX: y"), "messages[0].content[1].source.media_type"),
    ],
)
async def test_large_media_that_are_none_are_refused_by_their_place(source: Base64Source, where: str) -> None:
    with pytest.raises(RequestInvalid) as e:
        await intake(Checking()).offload(request_with(ImagePart(source=source)))
    assert e.value.where == where


class Checking(MemoryBlobs):
    """As the blob service does it."""

    async def store(self, content: Any, media_type: str) -> Any:
        return await super().store(content, parse_media_type(media_type))


@pytest.mark.parametrize(
    "failure", [BlobUnavailable("blobs", "away"), BlobQuotaExceeded("blobs", "full"), BlobUnauthorized("blobs")]
)
async def test_a_store_that_fails_leaves_the_request_whole_and_is_left_in_peace_for_a_while(failure: Any) -> None:
    blob_store, clock = CountingStore(), Clock()
    media = intake(blob_store, clock)
    request = request_with(ImagePart(source=inline(LARGE)), ImagePart(source=inline(LARGE)))
    blob_store.failure = failure
    assert await media.offload(request) == request
    assert blob_store.questions == TRIES
    blob_store.failure = None
    assert await media.offload(request) == request
    assert blob_store.questions == TRIES
    clock.now += AWAY_S
    assert await media.offload(request) != request


async def test_a_store_that_failed_once_is_tried_again() -> None:
    class Stumbling(MemoryBlobs):
        async def store(self, content: Any, media_type: str) -> Any:
            self.failure, failure = None, self.failure
            if failure:
                raise failure
            return await super().store(content, media_type)

    blob_store = Stumbling()
    blob_store.failure = BlobUnavailable("blobs", "away")
    await intake(blob_store).offload(request_with(ImagePart(source=inline(LARGE))))
    assert blob_store.stored == [blob_id_of(LARGE)]


async def test_a_store_that_never_answers_holds_a_request_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(MemoryBlobs):
        async def store(self, content: Any, media_type: str) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr("tokenbus_services.intake.blob_offload.TRY_S", 0.01)
    request = request_with(ImagePart(source=inline(LARGE)))
    assert await intake(Silent()).offload(request) == request


async def test_blobs_of_opaque_data_live_from_intake_on_too() -> None:
    blob_store = MemoryBlobs()
    blob_id = blob_store.put(b"thoughts", "text/plain")
    request = Generate(provider="p", model="m", messages=[Message(role="assistant", content=[THOUGHT])])
    assert await intake(blob_store).offload(request) == request
    assert blob_store.leased == [blob_id]


async def test_large_media_of_an_odd_type_are_stored_under_the_plain_one() -> None:
    blob_store = MemoryBlobs()
    image = ImagePart(source=inline(LARGE, "IMAGE/JPG; q=1"))
    request = Generate(provider="p", model="m", messages=[Message(role="user", content=[image])])
    taken = await intake(blob_store).offload(request)
    [(_, stored)] = blob_store.contents.values()
    assert stored == "image/jpeg"
    [part] = taken.messages[0].content
    assert isinstance(part, ImagePart)
    assert isinstance(part.source, BlobSource)

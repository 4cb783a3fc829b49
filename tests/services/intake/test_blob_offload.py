"""Media of accepted requests: large ones go to the blob store, and an unavailable store stops no request."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import msgspec
import pytest

from tests.services.fetcher.shelf import Shelf
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


class Asked(Shelf):
    """A shelf that counts every question, those that fail too."""

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


def intake(shelf: Shelf, clock: Clock | None = None) -> IntakeMedia:
    return IntakeMedia(RecentBlobs(shelf, 0), inline_characters=len(b64encode(LARGE)) - 1, clock=clock or Clock())


def inline(content: bytes, media_type: str = "image/png") -> Base64Source:
    return Base64Source(media_type=media_type, data=b64encode(content).decode())


def asks(*content: Any) -> Generate:
    return Generate(provider="p", model="m", messages=[Message(role="user", content=[TextPart(text="Look"), *content])])


async def test_large_data_in_any_field_becomes_a_reference_and_the_rest_is_unchanged() -> None:
    shelf = Shelf()
    url = ImagePart(source=UrlSource(url="https://example.org/a.png"))
    request = asks(
        ImagePart(source=inline(LARGE), cache=True),
        ImagePart(source=inline(SMALL)),
        url,
        DocumentPart(source=inline(LARGE, "application/pdf"), title="t"),
        ToolResultPart(tool_id="c", content=[TextPart(text="here"), ImagePart(source=inline(LARGE, "image/gif"))]),
    )
    moved = {"blob_id": blob_id_of(LARGE), "size_bytes": len(LARGE)}
    assert await intake(shelf).offload(request) == asks(
        ImagePart(source=BlobSource(media_type="image/png", **moved), cache=True),
        ImagePart(source=inline(SMALL)),
        url,
        DocumentPart(source=BlobSource(media_type="application/pdf", **moved), title="t"),
        ToolResultPart(
            tool_id="c",
            content=[TextPart(text="here"), ImagePart(source=BlobSource(media_type="image/gif", **moved))],
        ),
    )
    assert shelf.contents[blob_id_of(LARGE)][0] == LARGE


async def test_a_mask_is_moved_and_leased_as_any_image() -> None:
    shelf = Shelf()

    def masked(source: Any) -> Generate:
        return msgspec.structs.replace(asks(), images=ImageOptions(mask=ImagePart(source=source), previews=1))

    stored = BlobSource(media_type="image/png", blob_id=blob_id_of(LARGE), size_bytes=len(LARGE))
    assert await intake(shelf).offload(masked(inline(LARGE))) == masked(stored)
    shelf.leased.clear()
    await intake(shelf).offload(masked(stored))
    assert shelf.leased == [stored.blob_id]


async def test_a_request_without_media_asks_no_store() -> None:
    shelf = Asked()
    request = Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")])
    assert await intake(shelf).offload(request) == request
    assert shelf.questions == 0


async def test_a_blob_that_the_request_names_is_leased_and_a_missing_one_is_left_to_its_turn() -> None:
    shelf = Shelf()
    there = BlobSource(blob_id=shelf.put(LARGE, "image/png"), media_type="image/png")
    request = asks(
        ImagePart(source=there),
        ImagePart(source=BlobSource(blob_id=blob_id_of(b"gone"), media_type="image/png")),
        ImagePart(source=BlobSource(blob_id="no id", media_type="image/png")),
    )
    assert await intake(shelf).offload(request) == request
    assert shelf.leased == [there.blob_id]


async def test_a_blob_is_leased_once_however_often_it_is_named_and_too_many_blobs_are_refused() -> None:
    shelf = Shelf()
    images = [
        ImagePart(source=BlobSource(blob_id=shelf.put(b"%d" % n, "image/png"), media_type="image/png"))
        for n in range(MOST_BLOBS + 1)
    ]
    media = intake(shelf)
    await media.offload(asks(*images[:3] * 400))
    assert len(shelf.leased) == 3
    with pytest.raises(RequestInvalid) as e:
        await media.offload(asks(*images))
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
        await intake(Checking()).offload(asks(ImagePart(source=source)))
    assert e.value.where == where


class Checking(Shelf):
    """As the blob service does it."""

    async def store(self, content: Any, media_type: str) -> Any:
        return await super().store(content, parse_media_type(media_type))


@pytest.mark.parametrize(
    "failure", [BlobUnavailable("blobs", "away"), BlobQuotaExceeded("blobs", "full"), BlobUnauthorized("blobs")]
)
async def test_a_store_that_fails_leaves_the_request_whole_and_is_left_in_peace_for_a_while(failure: Any) -> None:
    shelf, clock = Asked(), Clock()
    media = intake(shelf, clock)
    request = asks(ImagePart(source=inline(LARGE)), ImagePart(source=inline(LARGE)))
    shelf.failure = failure
    assert await media.offload(request) == request
    assert shelf.questions == TRIES
    shelf.failure = None
    assert await media.offload(request) == request
    assert shelf.questions == TRIES
    clock.now += AWAY_S
    assert await media.offload(request) != request


async def test_a_store_that_failed_once_is_tried_again() -> None:
    class Stumbling(Shelf):
        async def store(self, content: Any, media_type: str) -> Any:
            self.failure, failure = None, self.failure
            if failure:
                raise failure
            return await super().store(content, media_type)

    shelf = Stumbling()
    shelf.failure = BlobUnavailable("blobs", "away")
    await intake(shelf).offload(asks(ImagePart(source=inline(LARGE))))
    assert shelf.stored == [blob_id_of(LARGE)]


async def test_a_store_that_never_answers_holds_a_request_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(Shelf):
        async def store(self, content: Any, media_type: str) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr("tokenbus_services.intake.blob_offload.TRY_S", 0.01)
    request = asks(ImagePart(source=inline(LARGE)))
    assert await intake(Silent()).offload(request) == request


async def test_blobs_of_opaque_data_live_from_intake_on_too() -> None:
    shelf = Shelf()
    blob_id = shelf.put(b"thoughts", "text/plain")
    request = Generate(provider="p", model="m", messages=[Message(role="assistant", content=[THOUGHT])])
    assert await intake(shelf).offload(request) == request
    assert shelf.leased == [blob_id]


async def test_large_media_of_an_odd_type_are_stored_under_the_plain_one() -> None:
    shelf = Shelf()
    image = ImagePart(source=inline(LARGE, "IMAGE/JPG; q=1"))
    request = Generate(provider="p", model="m", messages=[Message(role="user", content=[image])])
    taken = await intake(shelf).offload(request)
    [(_, stored)] = shelf.contents.values()
    assert stored == "image/jpeg"
    [part] = taken.messages[0].content
    assert isinstance(part, ImagePart)
    assert isinstance(part.source, BlobSource)

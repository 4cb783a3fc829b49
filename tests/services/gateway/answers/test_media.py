"""Bytes of the blob store for answers: each once, within the room that there is, and given back at the answer's end."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterable

import pytest

from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.errors import BlobError, BlobNotFound
from tokenbus.events.public import AudioRef, BlockComplete, ImagePreview, ImageRef, PublicEvent
from tokenbus_services.gateway.answers.media import InlineMedia
from tokenbus_services.net.web_socket import FairShare

SOUND = b"RIFF" * 5
FIELDS = {"run": "r", "seq": 1, "turn": 0, "attempt": 1, "block": 0}


class Store:
    """A blob loader with these contents."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = {blob_id_of(content): content for content in contents}

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        raise NotImplementedError

    async def load(self, blob_id: str) -> bytes:
        if blob_id not in self.contents:
            raise BlobNotFound(blob_id)
        return self.contents[blob_id]

    async def aclose(self) -> None:
        pass


def spoken(content: bytes) -> BlockComplete:
    sound = AudioRef(media_type="audio/wav", blob_id=blob_id_of(content), size_bytes=len(content))
    return BlockComplete(**FIELDS, kind="audio", content="Hi", audio=sound)


async def answer(events: list[PublicEvent]) -> AsyncGenerator[PublicEvent]:
    for event in events:
        yield event


async def data_of(media: InlineMedia, *events: PublicEvent, owner: str | None = None) -> list[str | None]:
    filled = [event async for event in media.filled(answer([*events]), owner)]
    for before, after in zip(events, filled, strict=True):
        assert type(before) is type(after)
    found: list[str | None] = []
    for event in filled:
        assert isinstance(event, BlockComplete | ImagePreview)
        ref = event.image if isinstance(event, ImagePreview) else event.audio or event.image
        assert ref
        assert ref.blob_id
        found.append(ref.base64)
    return found


async def test_images_previews_and_sounds_get_their_bytes_beside_their_ids() -> None:
    image = ImageRef(media_type="image/png", blob_id=blob_id_of(SOUND), size_bytes=len(SOUND))
    events: list[PublicEvent] = [
        spoken(SOUND),
        ImagePreview(**FIELDS, kind="image", index=0, image=image),
        BlockComplete(**FIELDS, kind="image", image=image),
    ]
    room = FairShare(100)
    assert await data_of(InlineMedia(Store(SOUND), room), *events) == [b64encode(SOUND).decode()] * 3
    assert room.total == 0


@pytest.mark.parametrize("error", [BlobNotFound, None])
async def test_what_the_store_does_not_give_stays_a_reference(error: type[BlobError] | None) -> None:
    room = FairShare(100)
    store = Store() if error else Store(SOUND)
    event = spoken(SOUND)
    assert event.audio
    if error is None:  # of unknown size: it could be of any
        sound = AudioRef(media_type="audio/wav", blob_id=event.audio.blob_id)
        event = BlockComplete(**FIELDS, kind="audio", audio=sound)
    assert await data_of(InlineMedia(store, room), event) == [None]
    assert room.total == 0


async def test_answers_hold_no_more_than_the_room_and_one_key_leaves_some_to_others() -> None:
    room = FairShare(3 * len(SOUND))
    media = InlineMedia(Store(SOUND), room)
    three = [spoken(SOUND)] * 3
    data = b64encode(SOUND).decode()
    assert await data_of(media, *three, owner="a") == [data, None, None]
    one = media.filled(answer([spoken(SOUND)]), "a")
    assert await anext(one)
    assert await data_of(media, *three, owner="b") == [data, None, None]
    await one.aclose()
    assert room.total == 0

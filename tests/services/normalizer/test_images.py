"""Images for the blob store: stored, retried, or left inline; never lost."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterable

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.commits import RecordingCommit
from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.errors import BlobRefused, BlobUnavailable
from tokenbus.events.frames import BusEvent, Data, ImagesRequested, Opened, RawFrame, encode, event_decoder
from tokenbus.events.normalized import Audio, BlockStart, BlockStop, Extra, Image, Normalized, Opaque, Start
from tokenbus.events.quirks import Quirks
from tokenbus_services.blobs import client as patience
from tokenbus_services.normalizer import image_offload as images
from tokenbus_services.normalizer.image_offload import ImageKeeper
from tokenbus_services.normalizer.logic import NormalizerLogic

AWAY = BlobUnavailable("blobs", "no connection")
ODD = BlobRefused("media type", "odd")
KEYS = Keys("t", 1)


class Store:
    """A blob store in memory; its first calls come to ``fails``."""

    def __init__(self, *fails: Exception) -> None:
        self.fails = list(fails)
        self.held: list[bytes] = []
        self.calls = 0

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        assert isinstance(content, bytes)
        self.calls += 1
        if self.fails:
            raise self.fails.pop(0)
        self.held.append(content)
        return BlobRef(blob_id=blob_id_of(content), media_type=media_type, size=len(content))

    async def load(self, blob_id: str) -> bytes:
        raise AssertionError("nobody asks for this here")

    async def aclose(self) -> None:
        pass


class DeafStore(Store):
    """Takes the connection and never answers."""

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        self.calls += 1
        return await asyncio.get_running_loop().create_future()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.001)


def image(content: bytes, *, final: bool = True, block: int = 0) -> Image:
    return Image(block, "image/png", b64encode(content).decode(), final, size_bytes=len(content))


def stored(content: bytes, *, final: bool = True, block: int = 0) -> Image:
    return Image(block, "image/png", "", final, blob_id=blob_id_of(content), size_bytes=len(content))


async def kept(store: Store, *given: Image | Audio | Opaque) -> list[list[Normalized]]:
    return await ImageKeeper(store, CollectorRegistry()).keep(given)


def why(event: Normalized) -> str:
    """What the note beside an image says."""
    assert isinstance(event, Extra)
    assert event.name == "tokenbus.image_not_stored"
    return msgspec.json.decode(event.json)


# --- the keeper -------------------------------------------------------------------------------------------------


async def test_a_stored_image_is_announced_with_the_size_in_its_header() -> None:
    png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + (640).to_bytes(4) + (480).to_bytes(4)
    [[event]] = await kept(Store(), image(png))
    assert isinstance(event, Image)
    assert (event.width, event.height) == (640, 480)


async def test_images_are_sent_as_blob_references() -> None:
    store = Store()
    assert await kept(store, image(b"c", final=False), image(b"cat")) == [[stored(b"c", final=False)], [stored(b"cat")]]
    assert sorted(store.held) == [b"c", b"cat"]


async def test_a_short_outage_of_the_store_is_retried() -> None:
    assert await kept(Store(AWAY, AWAY), image(b"cat")) == [[stored(b"cat")]]


@pytest.mark.parametrize(
    ("store", "calls"),
    [
        (Store(AWAY, AWAY, AWAY), 3),
        (Store(ODD), 1),
        (Store(RuntimeError("an own store")), 1),
        (DeafStore(), 1),
    ],
    ids=["away", "refused", "broken", "deaf"],
)
async def test_an_image_that_cannot_be_stored_stays_and_says_why(
    store: Store, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "STORE_TIMEOUT_S", 0.05)
    [[note, left]] = await kept(store, image(b"cat", block=7))
    assert left == image(b"cat", block=7)
    assert isinstance(note, Extra)
    assert note.block == 7
    assert why(note)
    assert store.calls == calls


async def test_a_preview_that_cannot_be_stored_is_left_out() -> None:
    [[note]] = await kept(Store(AWAY, AWAY, AWAY), image(b"cat", final=False))
    assert why(note) == "the blob store is unavailable"


async def test_an_unavailable_store_is_not_called_for_a_while() -> None:
    store = Store(AWAY, AWAY, AWAY)
    keeper = ImageKeeper(store, CollectorRegistry())
    await keeper.keep([image(b"cat")])
    [[note, left]] = await keeper.keep([image(b"dog")])
    assert left == image(b"dog")
    assert why(note) == "the blob store is unavailable"
    assert store.calls == 3


async def test_a_store_is_called_again_some_time_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "COOL_DOWN_S", 0.0)
    keeper = ImageKeeper(Store(AWAY, AWAY, AWAY), CollectorRegistry())
    await keeper.keep([image(b"cat")])
    assert await keeper.keep([image(b"dog")]) == [[stored(b"dog")]]


@pytest.mark.parametrize("text", ["no base64!", "pas du base64, même pas de l'ASCII"])
async def test_invalid_base64_is_not_changed(text: str) -> None:
    store = Store()
    [[note, left]] = await kept(store, Image(0, "image/png", text, True))
    assert left == Image(0, "image/png", text, True)
    assert "not valid base64" in why(note)
    assert store.calls == 0


# --- the logic --------------------------------------------------------------------------------------------------


def image_event(kind: str, content: bytes) -> bytes:
    event = {"type": f"image_generation.{kind}", "b64_json": b64encode(content).decode()}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def frame(n: int, *sent: tuple[str, bytes], requested: ImagesRequested | None = None) -> bytes:
    """A raw frame of the Images API; an attempt's first one says how the images were asked for."""
    data = Data(b"".join(image_event(*event) for event in sent))
    opened = Opened("openai-images", 200, {}, True, Quirks(), requested or ImagesRequested())
    return encode(RawFrame(0, 1, n, 0, [opened, data] if n == 0 else [data]))


def outputs(logic: NormalizerLogic) -> dict[str, list[BusEvent]]:
    """The events that the logic appends now, by run."""
    commit = RecordingCommit()
    logic.flush(commit)
    events: defaultdict[str, list[BusEvent]] = defaultdict(list)
    for run, frame in (pair for pairs in commit.appended.values() for pair in pairs):
        events[run] += event_decoder.decode(frame).events
    return dict(events)


async def test_each_image_of_a_batch_gets_its_own_blob_at_its_own_place() -> None:
    logic = NormalizerLogic(0, KEYS, ImageKeeper(Store(), CollectorRegistry()))
    logic.apply("a", frame(0, ("partial_image", b"c"), ("completed", b"cat")))
    logic.apply("b", frame(0, ("completed", b"dog"), requested=ImagesRequested(inline=True)))
    logic.apply("a", frame(1, ("completed", b"cow")))
    await logic.finish_replay()
    emitted = outputs(logic)
    assert emitted["a"] == [
        Start("", api="openai-images"),
        *(BlockStart(0, "image"), stored(b"c", final=False), stored(b"cat"), BlockStop(0)),
        *(BlockStart(1, "image"), stored(b"cow", block=1), BlockStop(1)),
    ]
    assert emitted["b"] == [Start("", api="openai-images"), BlockStart(0, "image"), image(b"dog"), BlockStop(0)]


async def test_notes_and_left_out_previews_move_no_other_image() -> None:
    logic = NormalizerLogic(0, KEYS, ImageKeeper(Store(ODD, ODD, ODD), CollectorRegistry()))
    logic.apply(
        "a", frame(0, ("partial_image", b"c"), ("completed", b"cat"), ("completed", b"dog"), ("completed", b"x"))
    )
    await logic.finish_replay()
    seen = [e.name if isinstance(e, Extra) else e for e in outputs(logic)["a"]]
    note = "tokenbus.image_not_stored"
    assert seen == [
        Start("", api="openai-images"),
        *(BlockStart(0, "image"), note, note, image(b"cat"), BlockStop(0)),
        *(BlockStart(1, "image"), note, image(b"dog", block=1), BlockStop(1)),
        *(BlockStart(2, "image"), stored(b"x", block=2), BlockStop(2)),
    ]


async def test_large_opaque_data_go_to_the_store_and_stay_at_hand_for_the_runs_own_next_turn() -> None:
    large, small = "é" * (images.LARGE_CHARS + 1), "e" * images.LARGE_CHARS
    assert not images.belongs_in_blob(Opaque(0, "encrypted", small), images=True)
    assert not images.belongs_in_blob(Opaque(0, "signature", large), images=True), "it has a field of its own"
    assert images.belongs_in_blob(Opaque(0, "encrypted", large), images=False)
    store = Store()
    assert await kept(store, Opaque(0, "encrypted", large)) == [
        [Opaque(0, "encrypted", large, blob_id_of(large.encode()))]
    ]
    assert store.held == [large.encode()]
    assert await kept(Store(ODD), Opaque(0, "encrypted", large)) == [[Opaque(0, "encrypted", large)]]


async def test_a_replay_stores_nothing() -> None:
    store = Store()
    logic = NormalizerLogic(0, KEYS, ImageKeeper(store, CollectorRegistry()))
    logic.apply("a", frame(0, ("partial_image", b"c")))
    logic.discard_outputs()
    logic.apply("a", frame(1, ("completed", b"cat")))
    await logic.finish_replay()
    assert store.held == [b"cat"]


async def test_a_restored_attempt_keeps_the_options_of_its_images() -> None:
    before = NormalizerLogic(0, KEYS)
    before.apply(
        "a", frame(0, ("partial_image", b"c"), requested=ImagesRequested(inline=True, prompt="A cat.", model="m"))
    )
    store = Store()
    logic = NormalizerLogic(0, KEYS, ImageKeeper(store, CollectorRegistry()))
    logic.restore("a", before.snapshot("a"))
    logic.apply("a", frame(1, ("completed", b"cat")))
    await logic.finish_replay()
    assert outputs(logic)["a"][0] == msgspec.structs.replace(image(b"cat"), prompt="A cat.", model="m")
    assert store.held == []


async def test_a_sound_is_stored_or_stays_in_its_event_with_a_note() -> None:
    sound = Audio(3, "audio/wav", b64encode(b"la").decode(), "audio_1")
    [[event]] = await kept(Store(), sound)
    assert event == msgspec.structs.replace(sound, base64="", blob_id=blob_id_of(b"la"), size_bytes=2)
    [[left, note]] = await kept(Store(ODD), sound)
    assert left == sound
    assert isinstance(note, Extra)
    assert (note.name, note.block) == ("tokenbus.audio_not_stored", 3)

"""Images of a run: started, shown, completed, and what of them goes back with the next turn."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.core.run.block_deltas import add
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.state import RunState
from tokenbus.errors import TooLarge
from tokenbus.events.frames import Accepted, Data, ImagesRequested, Opened, RawFrame, RunLimits
from tokenbus.events.normalized import BlockStart, BlockStop, Extra, Image, Normalized, Opaque
from tokenbus.events.public import BlockComplete, BlockStarted, ImagePreview, ImageRef, PublicEvent
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Base64Source, BlobSource, ImagePart

STORED = Image(0, "image/png", "", True, blob_id="sha256:1", size_bytes=3)


def published(*events: Normalized, limit: int = 100) -> tuple[list[PublicEvent], RunState]:
    """The public events of an attempt that says this, and the run's state after it."""
    state = RunState(
        "r",
        Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[]),
        0,
        BlockTable(0, 1, limit, 0),
    )
    out = Outbox()
    for event in events:
        add(state, out, event, 0)
    return out.number("r", 0), state


def test_an_image_is_started_shown_and_completed() -> None:
    first = msgspec.structs.replace(STORED, final=False)
    second = Image(0, "image/png", "AAAA", False)
    found, _ = published(BlockStart(0, "image", "A cat."), first, second, STORED, BlockStop(0))
    about = {"run": "r", "turn": 0, "attempt": 1, "block": 0, "kind": "image"}
    stored = ImageRef(media_type="image/png", blob_id="sha256:1", size_bytes=3)
    assert found == [
        BlockStarted(seq=0, prompt="A cat.", **about),
        ImagePreview(seq=1, index=0, image=stored, **about),
        ImagePreview(seq=2, index=1, image=ImageRef(media_type="image/png", base64="AAAA"), **about),
        BlockComplete(seq=3, image=stored, **about),
    ]


def test_an_image_goes_back_by_reference_with_what_its_provider_wants_back() -> None:
    _, state = published(BlockStart(0, "image"), STORED, Opaque(0, "thought_signature", "s"), BlockStop(0))
    source = BlobSource(blob_id="sha256:1", media_type="image/png", size_bytes=3)
    assert state.blocks.message_parts() == [ImagePart(source=source, opaque={"thought_signature": "s"})]


def test_opaque_data_of_an_image_may_come_after_its_end() -> None:
    _, state = published(BlockStart(0, "image"), STORED, BlockStop(0), Opaque(0, "item_id", "ig_1"))
    [part] = state.blocks.message_parts()
    assert isinstance(part, ImagePart)
    assert part.opaque == {"item_id": "ig_1"}


def test_an_image_in_no_blob_goes_back_with_its_bytes() -> None:
    _, state = published(BlockStart(0, "image"), Image(0, "image/png", "AAAA", True), BlockStop(0))
    assert state.blocks.message_parts() == [ImagePart(source=Base64Source(media_type="image/png", data="AAAA"))]


@pytest.mark.parametrize("events", [(), (msgspec.structs.replace(STORED, draft=True),)], ids=["none", "draft"])
def test_drafts_and_missing_images_are_not_sent_back(events: tuple[Image, ...]) -> None:
    _, state = published(BlockStart(0, "image"), *events, BlockStop(0))
    assert state.blocks.message_parts() == []


@pytest.mark.parametrize("final", [True, False])
def test_inline_bytes_are_bounded_as_all_of_a_block_is(final: bool) -> None:
    with pytest.raises(TooLarge, match="block 0"):
        published(BlockStart(0, "image"), Image(0, "image/png", "A" * 101, final))


def test_an_image_that_is_too_large_because_the_blob_store_was_away_says_so() -> None:
    note = Extra("tokenbus.image_not_stored", '"the blob store is unavailable"', 0)
    with pytest.raises(TooLarge, match='limit is 100; it is not in the blob store: "the blob'):
        published(BlockStart(0, "image"), note, Image(0, "image/png", "A" * 101, True))


def test_values_missing_in_the_answer_are_those_of_the_request() -> None:
    request = ImagesRequested(prompt="A cat.", model="gpt-image-2", size="8x8", quality="low")
    completed = {"type": "image_generation.completed", "b64_json": "AAAA", "size": "9x9"}
    data = Data(b"data: " + msgspec.json.encode(completed) + b"\n\n")
    reader = AttemptReader(1)
    reader.read(RawFrame(0, 1, 0, 0, [Opened("openai-images", 200, {}, True, Quirks(), request)]))
    reader = AttemptReader.load(reader.save())
    events = reader.read(RawFrame(0, 1, 1, 0, [data]))
    made = {"prompt": "A cat.", "model": "gpt-image-2", "size": "9x9", "quality": "low", "size_bytes": 3}
    image = Image(0, "image/png", "AAAA", True, **made)  # type: ignore[arg-type]
    assert events[1:3] == [BlockStart(0, "image", "A cat."), image]

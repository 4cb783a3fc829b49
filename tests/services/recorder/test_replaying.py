"""The replay of a record: what counts as a difference, and files that are no records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tokenbus.blobs import blob_id_of
from tokenbus.errors import Malformed
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    CancelRequested,
    Data,
    Ended,
    EventFrame,
    ImagesRequested,
    Opened,
    RawFrame,
    RunLimits,
    TapedFrame,
    encode,
)
from tokenbus.events.public import BlockComplete, Cancelled, Chunk, Completed, PublicEvent, RunEnd
from tokenbus.events.quirks import Quirks
from tokenbus_services.recorder.record import Record, from_builtins, packed
from tokenbus_services.recorder.replay import differences, replay

ACCEPTED = Accepted(
    provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[], record=True
)
BODY = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hello"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":" there"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
]
FRAMES = [
    RawFrame(0, 1, 0, 1, [Opened("openai-chat", 200, {}, True, Quirks()), Data(BODY[0])]),
    RawFrame(0, 1, 1, 2, [Data(BODY[1])]),
    RawFrame(0, 1, 2, 3, [Data(BODY[2]), Ended()]),
]


def control(event: Any) -> TapedFrame:
    return TapedFrame(EventFrame(0, CONTROL_ATTEMPT, 5, [event]), 1)


def attempt(events: int) -> TapedFrame:
    return TapedFrame(EventFrame(0, 1, 5, []), events)


def record(*taken: TapedFrame, frames: list[RawFrame] = FRAMES, events: list[dict[str, Any]] | None = None) -> Record:
    return Record(
        run="r",
        accepted_ms=1,
        request={},
        frames=packed([encode(frame) for frame in frames]),
        tape=packed([encode(piece) for piece in taken]),
        events=events or [],
    )


def texts(events: Sequence[PublicEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Chunk)]


def test_the_raw_stream_gives_the_run_again() -> None:
    events = replay(record(control(ACCEPTED), attempt(3), attempt(100)))
    assert isinstance(events[-1], Completed)
    assert "".join(texts(events)) == "Hello there"
    assert [e.seq for e in events] == list(range(len(events)))


def test_outside_events_are_replayed_at_their_original_position() -> None:
    before = replay(record(control(ACCEPTED), control(CancelRequested("enough")), attempt(100)))
    assert [type(e).__name__ for e in before] == ["Started", "Cancelled"]
    after = replay(record(control(ACCEPTED), attempt(3), control(CancelRequested("enough")), attempt(100)))
    assert isinstance(after[-1], Cancelled)
    assert texts(after) == ["Hello"]


def test_neither_the_cut_into_chunks_nor_times_are_a_difference() -> None:
    late = TapedFrame(EventFrame(0, 1, 9, []), 100)
    whole = replay(record(control(ACCEPTED), attempt(100)))
    in_two = replay(record(control(ACCEPTED), attempt(3), late))
    assert texts(in_two) == ["Hello", " there"]
    assert len(whole) < len(in_two)
    assert isinstance(end := whole[-1], Completed)
    assert isinstance(late_end := in_two[-1], Completed)
    assert end.timing != late_end.timing
    assert differences(whole, in_two) == []


def test_another_text_or_end_is_a_difference_and_is_shown() -> None:
    replayed = replay(record(control(ACCEPTED), attempt(100)))
    end = replayed[-1]
    assert isinstance(end, Completed)
    changed = [*replayed[:-1], msgspec.structs.replace(end, finish="length")]
    shown = "\n".join(differences(changed, replayed))
    assert '-{"type":"completed"' in shown
    assert '"finish":"length"' in shown
    assert differences(replayed[:-1], replayed)


def test_a_raw_stream_that_was_cut_off_gives_what_it_has() -> None:
    events = replay(record(control(ACCEPTED), attempt(100), frames=FRAMES[:1]))
    assert texts(events) == ["Hello"]
    assert not isinstance(events[-1], RunEnd)


@pytest.mark.parametrize("inline", [False, True])
def test_an_image_is_sent_unchanged_by_its_blob_or_inline(inline: bool) -> None:
    part = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
    answer = {"candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}]}
    opened = Opened("gemini", 200, {}, True, Quirks(), ImagesRequested(inline=inline))
    frame = RawFrame(0, 1, 0, 1, [opened, Data(b"data: " + msgspec.json.encode(answer) + b"\n\n"), Ended()])
    events = replay(record(control(ACCEPTED), attempt(100), frames=[frame]))
    [image] = [e.image for e in events if isinstance(e, BlockComplete)]
    assert image
    assert (image.base64, image.blob_id) == (("aGk=", None) if inline else (None, blob_id_of(b"hi")))


@pytest.mark.parametrize(
    "broken",
    [
        record(),
        record(attempt(1)),
        msgspec.structs.replace(record(control(ACCEPTED)), frames=b"\xc1"),
        msgspec.structs.replace(record(control(ACCEPTED)), tape=packed([b"\x01"])),
    ],
)
def test_a_damaged_record_is_reported(broken: Record) -> None:
    with pytest.raises(Malformed):
        replay(broken)


@pytest.mark.parametrize("value", [[], {}, {"format": 2}, {**msgspec.to_builtins(record()), "frames": "no base64!"}])
def test_a_file_that_is_not_a_record_is_reported(value: Any) -> None:
    with pytest.raises(Malformed, match="file"):
        from_builtins(value, "file")
    with pytest.raises(Malformed, match="events"):
        record(events=[{"type": "nothing"}]).public_events()


def test_a_record_names_the_media_that_it_needs() -> None:
    blob = "sha256:" + 64 * "a"
    kept = record(events=[{"images": [{"blob_id": blob}], "blob_id": "somebody's own"}])
    assert kept.media() == {blob}

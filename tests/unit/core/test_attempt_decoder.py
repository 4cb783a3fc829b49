"""One attempt's raw frames: copies, gaps, and what the end of the call means."""

from __future__ import annotations

import json

import pytest

from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ANY_FRAME, BusEvent, Data, Ended, Lost, Opened, RawFrame, RawItem
from tokenbus.events.normalized import BlockStop, Cut, Done, Failed, TextDelta
from tokenbus.events.quirks import Quirks

OPENED = Opened("openai-chat", 200, {"content-type": "text/event-stream"}, True, Quirks())
RESET = ErrorInfo(code="network", kind="network", message="reset", retryable=True)
TIMEOUT = ErrorInfo(code="idle_timeout", kind="timeout", message="silent", retryable=True)


def text_chunk(text: str, finish: str | None = None) -> Data:
    chunk = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return Data(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def frame(n: int, *items: RawItem) -> RawFrame:
    return RawFrame(0, 1, n, 0, list(items))


def read(*frames: RawFrame) -> list[BusEvent]:
    reader = AttemptReader(1)
    events: list[BusEvent] = []
    for each in frames:
        events += reader.read(each)
        reader = AttemptReader.load(reader.save())
    return events


def test_a_body_that_ends_after_its_finish_reason_is_done() -> None:
    assert isinstance(read(frame(0, OPENED, text_chunk("Hi", "stop")), frame(1, Ended()))[-1], Done)


@pytest.mark.parametrize("error", [RESET, TIMEOUT])
def test_a_connection_that_breaks_after_the_finish_reason_is_cut(error: ErrorInfo) -> None:
    assert read(frame(0, OPENED, text_chunk("Hi", "stop")), frame(1, Ended(error)))[-1] == Cut(error.message, error)


@pytest.mark.parametrize("finish", ["", "STOP"])
def test_a_block_that_ends_only_with_a_broken_body_is_not_whole(finish: str) -> None:
    opened = Opened("gemini", 200, {"content-type": "text/event-stream"}, True, Quirks())
    chunk = {"candidates": [{"content": {"parts": [{"text": "Hi"}]}, "finishReason": finish}]}
    events = read(frame(0, opened, Data(b"data: " + json.dumps(chunk).encode() + b"\n\n")), frame(1, Ended(RESET)))
    assert any(isinstance(e, TextDelta) for e in events)
    assert not any(isinstance(e, BlockStop) for e in events)


def test_a_connection_that_breaks_after_the_terminal_event_changes_nothing() -> None:
    events = read(frame(0, OPENED, text_chunk("Hi", "stop"), Data(b"data: [DONE]\n\n")), frame(1, Ended(RESET)))
    assert [type(e) for e in events if isinstance(e, Done | Cut | Failed)] == [Done]


def test_an_internal_error_before_any_answer_is_the_attempts_error() -> None:
    assert read(frame(0, Ended(RESET))) == [Failed(RESET)]


def test_a_copy_of_a_frame_gives_nothing() -> None:
    first = frame(0, OPENED, text_chunk("once"))
    texts = [e.text for e in read(first, first, frame(1, text_chunk("twice"))) if isinstance(e, TextDelta)]
    assert texts == ["once", "twice"]


def test_a_gap_in_the_frames_cuts_the_attempt() -> None:
    events = read(frame(0, OPENED, text_chunk("Hi")), frame(2, text_chunk("!"), Ended()))
    assert isinstance(events[-1], Cut)
    assert events[-1].error
    assert events[-1].error.code == "frames_lost"
    assert not any(isinstance(e, TextDelta) and e.text == "!" for e in events)


def test_ending_a_lost_attempt_needs_none_of_its_frames() -> None:
    reader = AttemptReader(1)
    reader.read(frame(0, OPENED, text_chunk("Hi")))
    [end] = [e for e in reader.read(RawFrame(0, 1, ANY_FRAME, 0, [Lost("gone")])) if isinstance(e, Cut)]
    assert (end.reason, reader.over) == ("gone", True)


@pytest.mark.parametrize("name", ["request-id", "x-request-id"])
def test_every_end_of_an_attempt_has_the_providers_call_id(name: str) -> None:
    refused = Opened("anthropic", 529, {name: "req-1"}, True, Quirks())
    opened = Opened("openai-chat", 200, {"content-type": "text/event-stream", name: "req-1"}, True, Quirks())
    for frames in (
        [frame(0, refused, Data(b"busy"), Ended())],
        [frame(0, opened), frame(1, Ended(TIMEOUT))],
        [frame(0, opened, text_chunk("Hi")), frame(1, Ended())],
        [frame(0, opened, text_chunk("Hi")), frame(2, Ended())],
        [frame(0, opened, Data(b'data: {"error":{"message":"no"}}\n\n')), frame(1, Ended())],
        [frame(0, opened, Data(b"data: no json\n\n")), frame(1, Ended())],
    ):
        end = read(*frames)[-1]
        assert isinstance(end, Failed | Cut)
        assert end.error
        assert end.error.request_id == "req-1"

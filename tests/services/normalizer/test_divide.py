"""A provider's answer in one piece: the normalizer hands it on in parts that the parser can work on in turn."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.services.parser.test_logic import KEYS
from tokenbus.bus.scripts import Commit
from tokenbus.events.frames import Data, Ended, EventFrame, Opened, RawFrame, decode_events, encode
from tokenbus.events.normalized import BlockStart, BlockStop, TextDelta, ThinkingDelta, ToolCallDelta
from tokenbus.events.quirks import Quirks
from tokenbus_services.normalizer.logic import ENTRY_COST, PIECE_CHARS, NormalizerLogic, divided

TEXT = "".join(f"word {n} \U0001f600 " for n in range(40_000))


def test_a_large_text_is_divided_and_the_order_stays() -> None:
    events: list[Any] = [
        BlockStart(0, "text"),
        TextDelta(0, TEXT),
        ThinkingDelta(1, "short"),
        ToolCallDelta(2, TEXT[::-1]),
        BlockStart(3, "text"),
    ]
    parts = divided(EventFrame(0, 1, 5, events))
    assert {(part.turn, part.attempt, part.at_ms) for part in parts} == {(0, 1, 5)}
    pieces = [event for part in parts for event in part.events]
    kinds = [
        kind for kind, before in zip(map(type, pieces), [None, *map(type, pieces)], strict=False) if kind != before
    ]
    assert kinds == [BlockStart, TextDelta, ThinkingDelta, ToolCallDelta, BlockStart]
    assert "".join(event.text for event in pieces if isinstance(event, TextDelta)) == TEXT
    assert "".join(event.fragment for event in pieces if isinstance(event, ToolCallDelta)) == TEXT[::-1]
    assert max(len(event.text) for event in pieces if isinstance(event, TextDelta)) == PIECE_CHARS
    assert [divided(part) for part in parts] == [[part] for part in parts], "a part is not divided again"


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_in_one_event_becomes_small_entries_for_the_parser(stream: bool) -> None:
    choice = {"delta" if stream else "message": {"role": "assistant", "content": TEXT}, "index": 0}
    body = json.dumps({"id": "x", "model": "m", "choices": [choice | {"finish_reason": "stop"}]}).encode()
    data = b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body
    kind = "text/event-stream" if stream else "application/json"
    opened = Opened(api="openai-chat", status=200, headers={"content-type": kind}, stream=stream, quirks=Quirks())
    logic = NormalizerLogic(0, KEYS)
    logic.apply("run", encode(RawFrame(0, 1, 0, 1, [opened, Data(data), Ended()])))
    commit = Commit("lease", "raw")
    logic.flush(commit)
    entries = commit.appended(KEYS.topic(0, "events"))
    frames = [decode_events(entry[b"run"]) for entry in entries]
    texts = [event.text for frame in frames for event in frame.events if isinstance(event, TextDelta)]
    assert "".join(texts) == TEXT
    assert max(len(entry[b"run"]) for entry in entries) < 5 * ENTRY_COST
    assert len(entries) > len(TEXT) // ENTRY_COST
    logic.flush(again := Commit("lease", "raw"))
    assert not again.operations


def test_many_short_blocks_are_divided_too() -> None:
    events: list[Any] = [
        event for n in range(5000) for event in (BlockStart(n, "text"), TextDelta(n, "x"), BlockStop(n))
    ]
    parts = divided(EventFrame(0, 1, 5, events))
    assert [event for part in parts for event in part.events] == events
    assert max(len(part.events) for part in parts) < 500
    body = [{"text": "x", "thought": bool(n % 2)} for n in range(5000)]
    data = json.dumps({"candidates": [{"content": {"parts": body}, "index": 0}]}).encode()
    opened = Opened(api="gemini", status=200, headers={}, stream=True, quirks=Quirks())
    logic = NormalizerLogic(0, KEYS)
    logic.apply("run", encode(RawFrame(0, 1, 0, 1, [opened, Data(b"data: " + data + b"\n\n"), Ended()])))
    logic.flush(commit := Commit("lease", "raw"))
    frames = [decode_events(entry[b"run"]) for entry in commit.appended(KEYS.topic(0, "events"))]
    assert sum(isinstance(event, TextDelta | ThinkingDelta) for frame in frames for event in frame.events) == 5000
    assert max(len(frame.events) for frame in frames) < 500


def test_a_frame_of_a_size_that_models_send_stays_one_entry() -> None:
    frame = EventFrame(0, 1, 5, [TextDelta(0, "a word ") for _ in range(500)])
    assert divided(frame) == [frame]
    assert msgspec.structs.asdict(divided(frame)[0]) == msgspec.structs.asdict(frame)

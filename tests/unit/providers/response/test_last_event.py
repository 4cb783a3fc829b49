"""A stream's last event is detected without decoding it, and never too early, for any content."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import over_rows
from tests.unit.providers.corpus import APIS, Recording, needs_corpus, recordings
from tests.unit.providers.reading import cut, decoder
from tokenbus.events.normalized import Done
from tokenbus.events.quirks import ApiName
from tokenbus.providers import registry
from tokenbus_services.fetcher.calls.response_relay import LastEvent

LAST: list[tuple[ApiName, bytes]] = [
    ("anthropic", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("anthropic", b'data:{"type": "message_stop", "amazon-bedrock-invocationMetrics": {}}\r\n\r\n'),
    ("anthropic", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'),
    ("openai-chat", b"data: [DONE]\n\n"),
    ("openai-chat", b'data: {"error":{"message":"broken","code":502}}\n\n'),
    ("openai-responses", b'data: {"type":"response.completed","response":{"output":[]}}\n\n'),
    ("openai-responses", b'data: {"type": "response.incomplete","response":{}}\n\n'),
    ("openai-responses", b'data: {"type":"response.failed","response":{}}\n\n'),
    ("openai-responses", b'data: {"type":"error","message":"broken"}\n\n'),
    ("openai-images", b'data: {"type":"error","error":{"message":"broken"}}\n\n'),
    ("gemini", b'data: {"error":{"code":503,"status":"UNAVAILABLE"}}\n\n'),
    ("gemini-interactions", b"event: done\ndata: [DONE]\n\n"),
    ("gemini-interactions", b'event: error\ndata: {"error":{"message":"m","code":"c"},"event_type":"error"}\n\n'),
]
NOT_LAST: list[tuple[ApiName, bytes]] = [
    ("anthropic", b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'),
    ("openai-chat", b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'),
    ("openai-chat", b'data: {"error":null,"choices":[]}\n\n'),
    ("openai-responses", b'data: {"type":"response.output_text.done","text":"response.completed"}\n\n'),
    ("gemini", b'data: {"candidates":[{"finishReason":"STOP"}],"usageMetadata":{}}\n\n'),
    ("gemini-interactions", b'data: {"index":1,"delta":{"type":"text","text":"[DONE]"},"event_type":"step.delta"}\n\n'),
    ("openai-images", b'data: {"type":"image_generation.completed","b64_json":""}\n\n'),
]
APIS_WITH_ONE: tuple[ApiName, ...] = ("anthropic", "openai-chat", "openai-responses")
ROWS = recordings(*APIS)
REPLY: dict[ApiName, bytes] = {
    "anthropic": b'"message_stop"',
    "openai-chat": b"[DONE]",
    "openai-responses": b'{"type":"response.completed"',
}


def watch(api: ApiName) -> LastEvent:
    return LastEvent(registry.get(api).last)


@pytest.mark.parametrize(("api", "event"), LAST)
def test_the_last_event_is_seen_with_the_end_of_its_line_however_it_is_cut(api: ApiName, event: bytes) -> None:
    end = event.rstrip(b"\r\n")
    for place in range(1, len(end)):
        last = watch(api)
        assert not last.feed(b": a comment\n\n" + end[:place])
        assert not last.feed(end[place:])
        assert last.feed(b"\n")
        assert last.seen
    one_by_one = watch(api)
    assert [one_by_one.feed(event[i : i + 1]) for i in range(len(event))].index(True) == len(end)


@pytest.mark.parametrize(("api", "event"), LAST)
def test_nothing_that_follows_what_was_seen_would_change_what_the_decoder_says(api: ApiName, event: bytes) -> None:
    reader = decoder(api)
    before = reader.feed(event) + reader.end()
    other = decoder(api)
    assert before == other.feed(event) + other.feed(event) + other.end()


@pytest.mark.parametrize(("api", "event"), NOT_LAST)
def test_a_finish_reason_or_usage_is_not_the_end(api: ApiName, event: bytes) -> None:
    assert not watch(api).feed(event)


@given(
    text=st.lists(st.sampled_from([event.decode() for _, event in LAST]) | st.text(max_size=5)).map("".join),
    places=st.lists(st.integers(0, 400), max_size=6),
)
def test_a_text_that_holds_last_events_is_no_last_event(text: str, places: list[int]) -> None:
    data = msgspec.json.encode({"type": "content_block_delta", "text": text})
    stream = b"event: content_block_delta\ndata: " + data + b"\n\n"
    for api in APIS_WITH_ONE:
        last = watch(api)
        assert not any(last.feed(piece) for piece in cut(stream, [p for p in places if p < len(stream)]))


@needs_corpus
@over_rows("row", ROWS, ids=[row.file for row in ROWS])
def test_in_recorded_streams_nothing_of_worth_follows_it(row: Recording) -> None:
    data, last, whole = row.data, watch(row.api_name), decoder(row.api_name)
    expected = whole.feed(data) + whole.end()
    dice = random.Random(row.file)
    read = b""
    for piece in cut(data, sorted(dice.randrange(len(data)) for _ in range(40))):
        read += piece
        if last.feed(piece):
            break
    early = decoder(row.api_name)
    assert early.feed(read) + early.end() == expected


@needs_corpus
def test_recorded_streams_have_it_if_their_api_does() -> None:
    missed: list[str] = []
    found = 0
    for row in ROWS:
        mark = REPLY.get(row.api_name)
        whole = decoder(row.api_name)
        done = any(isinstance(event, Done) for event in whole.feed(row.data))
        if mark and done and mark in row.data:
            if watch(row.api_name).feed(row.data + b"\n"):
                found += 1
            else:
                missed.append(row.file)
    assert not missed
    assert found > 50

"""The framing: every odd stream of providers.md, and any cutting of it."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.providers.reading import cut
from tokenbus.providers.response.sse import MAX_COMMENT_BYTES, MAX_IDLE_LINES, SseDecoder, SseEvent


def decode(*pieces: bytes, limit: int = 1000) -> list[SseEvent]:
    decoder = SseDecoder(limit=limit)
    events: list[SseEvent] = []
    for piece in pieces:
        events += decoder.feed(piece)
    return events + decoder.end()


ONE = [SseEvent(b'{"a":1}')]
ODD: dict[str, tuple[bytes, list[SseEvent]]] = {
    "lines end in LF": (b'data: {"a":1}\n\n', ONE),
    "lines end in CRLF": (b'data: {"a":1}\r\n\r\n', ONE),
    "lines end in CR": (b'data: {"a":1}\r\r', ONE),
    "line ends are mixed": (b'event: x\r\ndata: {"a":1}\n\r\n', [SseEvent(b'{"a":1}', b"x")]),
    "a byte order mark leads": (b'\xef\xbb\xbfdata: {"a":1}\n\n', ONE),
    "no space after the colon": (b'data:{"a":1}\n\n', ONE),
    "only one space is cut": (b"data:  x\n\n", [SseEvent(b" x")]),
    "several data lines": (b'data: {"a":\ndata:1\ndata: }\n\n', [SseEvent(b'{"a":\n1\n}')]),
    "comments and unknown fields": (b': OPENROUTER\n\nid: 7\nretry: 10\nfoo\ndata: {"a":1}\n\n', ONE),
    "a comment inside of an event": (b'data: {"a":1}\n: hm\n\n', ONE),
    "no blank line at the end": (b'data: {"a":1}\n', ONE),
    "no line end at the end": (b'data: {"a":1}', ONE),
    "an event without data": (b"event: ping\n\ndata\n\ndata: \n\n", []),
    "a name is of one event only": (b"event: x\ndata: 1\n\ndata: 2\n\n", [SseEvent(b"1", b"x"), SseEvent(b"2")]),
    "a field called error": (b'data: 1\n\nerror: {"m":1}\n\n', [SseEvent(b"1"), SseEvent(b'{"m":1}', b"error")]),
    "error follows without a blank line": (b"data: 1\nerror: 2\n", [SseEvent(b"1"), SseEvent(b"2", b"error")]),
    "JSON without framing": (b'{\n  "a": 1\n}\n', [SseEvent(b'{\n  "a": 1\n}')]),
    "JSON without framing after events": (b'data: 1\n\n{\n"a": 1}\n', [SseEvent(b"1"), SseEvent(b'{\n"a": 1}')]),
    "events after JSON without framing": (b'{"a":1}\n\ndata: 2\n\n', [*ONE, SseEvent(b"2")]),
    "a JSON array": (b'[{"a":1}\n,\n{"b":2}]', [*ONE, SseEvent(b'{"b":2}')]),
    "a JSON array cut off": (b'[{"a":1}\n,', [SseEvent(b'[{"a":1}\n,')]),
    "an HTML page": (b"<html>\n<body>gone: away</body>\n", []),
    "characters of several bytes": ('data: "日本😀"\n\n'.encode(), [SseEvent('"日本😀"'.encode())]),
    "nothing": (b"", []),
    "half a byte order mark": (b"\xef\xbb", []),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_stream_is_read_as_meant(name: str) -> None:
    data, events = ODD[name]
    assert decode(data) == events


@pytest.mark.parametrize("name", ODD)
def test_it_reads_the_same_cut_at_any_byte_and_at_every_byte(name: str) -> None:
    data, events = ODD[name]
    for place in range(len(data) + 1):
        assert decode(data[:place], data[place:]) == events
    assert decode(*(data[i : i + 1] for i in range(len(data)))) == events


def test_an_event_is_given_as_soon_as_its_blank_line_came() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n") == []
    assert decoder.feed(b"\n") == [SseEvent(b"1")]
    assert decoder.feed(b"data: 2\r\n\r") == [SseEvent(b"2")]
    assert decoder.feed(b"\ndata: 3\n\n") == [SseEvent(b"3")]


@pytest.mark.parametrize(
    "data",
    [
        b"data: " + b"x" * 60 + b"\n\n",
        b"data: " + b"x" * 60,
        b": " + b"x" * 60 + b"\n",
        b"data: xxxxxxxx\n" * 6 + b"\n",
        b"data:\n" * 60 + b"\n",
        b'{"a":\n' * 10,
    ],
)
def test_an_event_over_the_limit_ends_the_reading_for_any_cut_of_the_bytes(data: bytes) -> None:
    before = b"data: 1\n\n"
    for pieces in ([before + data], cut(before + data, range(1, len(before + data)))):
        decoder = SseDecoder(limit=50)
        events = [event for piece in pieces for event in decoder.feed(piece)] + decoder.end()
        assert decoder.oversize
        assert events == [SseEvent(b"1")]
        assert decoder.feed(b"data: 2\n\n") + decoder.end() == []


def test_an_event_at_the_limit_is_read() -> None:
    line = b"data: " + b"x" * 44
    assert decode(line + b"\n\n", limit=50) == [SseEvent(b"x" * 44)]
    assert decode(*(line[i : i + 1] for i in range(50)), limit=50) == [SseEvent(b"x" * 44)]


def test_memory_is_bounded_by_the_limit() -> None:
    decoder = SseDecoder(limit=1000)
    for _ in range(100):
        decoder.feed(b"data:\n" * 500)
        decoder.feed(b"y" * 700)
        assert len(decoder.line) + len(decoder.more) + len(decoder.bare) <= 2000


def test_time_is_linear_however_small_the_reads() -> None:
    def seconds(size: int) -> float:
        data = b"data: " + b"x" * size + b"\n\n"
        decoder = SseDecoder()
        began = time.process_time()
        for i in range(0, len(data), 16):
            decoder.feed(data[i : i + 16])
        return time.process_time() - began

    seconds(100_000)
    small, large = seconds(100_000), seconds(800_000)
    assert large < 24 * small + 0.5  # 8 times the bytes; copying the buffer at each read would make it 64


LINES = st.sampled_from(
    [b"data: ", b"data:", b"data: 1", b"event: e", b"error: 1", b"", b": c", b"{", b"[", b"]", b"}", b"id: 1", b"x"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r", b""])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(LINES, ENDS), max_size=20).map(lambda parts: b"".join(a + b for a, b in parts)),
    st.data(),
)
def test_any_cutting_gives_the_same_events_and_so_does_a_decoder_restored(data: bytes, draw: st.DataObject) -> None:
    places = draw.draw(st.lists(st.integers(0, len(data)), max_size=6))
    whole = decode(data)
    assert decode(*cut(data, places)) == whole
    decoder = SseDecoder(limit=1000)
    events: list[SseEvent] = []
    for piece in cut(data, places):
        events += decoder.feed(piece)
        decoder = msgspec.msgpack.decode(msgspec.msgpack.encode(decoder), type=SseDecoder)
    assert events + decoder.end() == whole


@pytest.mark.parametrize("line", [b"\n", b": hm\n", b"odd\n", b"event: x\n", b"data:\n", b"event: x\n\n"])
def test_lines_that_say_nothing_are_counted_and_too_many_end_the_reading(line: bytes) -> None:
    enough = line * (MAX_IDLE_LINES // 2)
    decoder = SseDecoder()
    decoder.feed(b"data: 1\n" + enough)
    assert not decoder.oversize
    decoder.feed(enough * 2)
    assert decoder.oversize


def test_comments_are_bounded_in_bytes_too_and_those_of_a_day_are_not_too_many() -> None:
    decoder = SseDecoder()
    for _ in range(16):
        decoder.feed(b": " + b"x" * (MAX_COMMENT_BYTES // 16 - 2) + b"\n\n")
    assert not decoder.oversize
    decoder.feed(b":\n")
    assert decoder.oversize
    patient = SseDecoder()
    patient.feed(b": OPENROUTER PROCESSING\n" * (24 * 60 * 60) + b"data: 1\n\n")
    assert not patient.oversize


def test_lines_of_events_and_of_bare_json_are_no_idle_ones() -> None:
    decoder = SseDecoder()
    decoder.feed(b"event: x\ndata: {\ndata: }\n\n" * 100 + b"[\n" + b"1,\n" * 100 + b"1]")
    decoder.end()
    assert decoder.idle == 0

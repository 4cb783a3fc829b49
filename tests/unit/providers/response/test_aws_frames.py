"""The binary frames of AWS become server-sent events, however their bytes are cut; anything else is a named error."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from struct import pack
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.reading import cut
from tokenbus.errors import Malformed, TooLarge, WireError
from tokenbus.providers.response.aws_frames import MAX_FRAME_BYTES, AwsFrames
from tokenbus_services.mock_provider.apis.claude_clouds import frame

TEXTS = ['{"type":"ping"}', '{"type":"content_block_delta","delta":{"text":"ü🌧️"}}', "{}"]


def chunk(text: str) -> bytes:
    return frame({":event-type": "chunk"}, msgspec.json.encode({"bytes": b64encode(text.encode()).decode(), "p": "ab"}))


CHUNKS = b"".join(map(chunk, TEXTS))
EVENTS = "".join(f"data: {text}\n\n" for text in TEXTS).encode()


def fed(pieces: Sequence[bytes]) -> bytes:
    frames = AwsFrames()
    return b"".join(frames.feed(piece) for piece in pieces)


def with_right_sums(prelude: bytes, rest: bytes = b"") -> bytes:
    begun = prelude + pack(">I", crc32(prelude)) + rest
    return begun + pack(">I", crc32(begun))


@given(st.lists(st.integers(0, len(CHUNKS)), max_size=20))
def test_frames_are_read_however_their_bytes_are_cut(places: list[int]) -> None:
    assert fed(cut(CHUNKS, places)) == EVENTS


def test_botocore_reads_the_same_frames() -> None:
    eventstream = pytest.importorskip("botocore.eventstream", reason="botocore is not installed")
    buffer = eventstream.EventStreamBuffer()
    buffer.add_data(CHUNKS)
    found = [(event.headers[":event-type"], msgspec.json.decode(event.payload)["bytes"]) for event in buffer]
    assert found == [("chunk", b64encode(text.encode()).decode()) for text in TEXTS]


def test_an_exception_and_an_error_are_error_events() -> None:
    thrown = frame({":message-type": "exception", ":exception-type": "throttlingException"}, b'{"message":"slow down"}')
    failed = frame({":message-type": "error", ":error-code": "InternalError", ":error-message": "oh\nno"}, b"")
    read = [
        msgspec.json.decode(event.removeprefix(b"event: error\ndata: "))
        for event in fed([thrown + failed]).split(b"\n\n")[:-1]
    ]
    assert [error["error"] for error in read] == [
        {"type": "throttlingException", "message": "slow down"},
        {"type": "InternalError", "message": "oh\nno"},
    ]


def test_another_event_is_its_payload_and_no_line_of_it_is_a_field() -> None:
    event = frame({":event-type": "messageStart"}, b'{\r"role":\n"assistant"}')
    assert fed([event]) == b'data: {\ndata: "role":\ndata: "assistant"}\n\n'


@pytest.mark.parametrize("place", range(len(chunk(TEXTS[0]))))
def test_a_changed_byte_anywhere_is_an_error_or_waits_for_more(place: int) -> None:
    data = bytearray(chunk(TEXTS[0]))
    data[place] ^= 0x40
    with pytest.raises(Malformed, match="checksum"):
        fed([bytes(data)])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (with_right_sums(pack(">II", 15, 0)), "shorter than its headers"),
        (with_right_sums(pack(">II", 20, 400), b"aaaa"), "shorter than its headers"),
        (with_right_sums(pack(">II", 20, 4), b"\xffabc"), "headers cannot be read"),
        (with_right_sums(pack(">II", 20, 4), b"\x01a\x63b"), "headers cannot be read"),
        (with_right_sums(pack(">II", 21, 5), b"\x01a\x07\xff\xff"), "a header is cut off"),
        (with_right_sums(pack(">II", 20, 4), b"\x01\xff\x00\x00"), "headers cannot be read"),
        (frame({":event-type": "chunk"}, b'{"bytes":"*"}'), "base64"),
        (frame({":event-type": "chunk"}, b"{"), "truncated"),
        (b"data: {}\n\n" * 2, "checksum"),
    ],
)
def test_a_frame_that_cannot_be_read_says_why(data: bytes, problem: str) -> None:
    with pytest.raises(Malformed, match=problem):
        fed([data])


def test_a_frame_over_the_limit_is_refused_by_its_length_alone() -> None:
    prelude = pack(">II", MAX_FRAME_BYTES + 1, 0)
    with pytest.raises(TooLarge):
        fed([prelude + pack(">I", crc32(prelude))])


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_are_frames_or_a_named_error(pieces: list[bytes]) -> None:
    frames = AwsFrames()
    try:
        for piece in pieces:
            frames.feed(piece)
    except WireError:
        pass

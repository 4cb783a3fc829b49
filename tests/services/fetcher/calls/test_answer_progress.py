"""What counts as progress of an answer: its events, not what only keeps the connection open."""

from __future__ import annotations

import pytest

from tokenbus_services.fetcher.calls.call_timeouts import AnswerProgress

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
TOKEN = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n'


@pytest.mark.parametrize(
    "kept_open",
    [b": comment\n\n", b": data: hidden\n\n", b"\n\n", PING, b"data:\n\n", b"data: {}\r\n\r\n", b"event: x\n\n"],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_comments_pings_and_empty_lines_are_no_progress_however_they_are_cut(kept_open: bytes, size: int) -> None:
    progress = AnswerProgress(events=True)
    sent = kept_open * 5
    for at in range(0, len(sent), size):
        assert not progress.feed(sent[at : at + size], wanted=True)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("before", [b"", PING, b": comment\n\n"])
def test_an_event_of_the_answer_is_progress_however_it_is_cut(size: int, before: bytes) -> None:
    progress = AnswerProgress(events=True)
    sent = before + TOKEN
    assert any(progress.feed(sent[at : at + size], wanted=True) for at in range(0, len(sent), size))


def test_a_long_event_is_progress_before_its_end() -> None:
    progress = AnswerProgress(events=True)
    progress.feed(b'data: {"b64_json": "', wanted=False)
    assert any(progress.feed(b"QUJD" * 4, wanted=True) for _ in range(8))


def test_of_a_body_without_events_anything_but_whitespace_is_progress() -> None:
    progress = AnswerProgress(events=False)
    assert not progress.feed(b" \n ", wanted=True)
    assert progress.feed(b'{"id', wanted=True)

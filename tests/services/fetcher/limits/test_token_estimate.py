"""What a call is reckoned to take, and what it took."""

from __future__ import annotations

import pytest

from tokenbus.events.frames import Opened
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import Base64Source, Generate, ImagePart, Message
from tokenbus_services.fetcher.limits.token_estimate import UNBOUNDED_OUTPUT_TOKENS, TokenTally, estimate
from tokenbus_services.pricing import IMAGE_TOKENS

BODY = b'{"type":"error","error":{"type":"rate_limit_error","message":"slow down"}}'
START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","model":"m","role":"assistant",'
    b'"content":[],"usage":{"input_tokens":10,"output_tokens":1}}}\n\n'
)
END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":7}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def request_with(*content: object, **fields: object) -> Generate:
    messages = [Message(role="user", content=c) for c in content]  # pyright: ignore[reportArgumentType]
    return Generate(provider="p", model="m", messages=messages, **fields)  # pyright: ignore[reportArgumentType]


def tally(status: int, *reads: bytes, ended: bool = True, wait: str = "0") -> TokenTally:
    listening = TokenTally()
    listening.open(Opened("anthropic", status, {"retry-after": wait}, True, Quirks()))
    for read in reads:
        listening.feed(read)
    if ended:
        listening.end()
    return listening


def test_a_request_reserves_its_text_its_history_and_the_most_that_it_may_answer() -> None:
    short = estimate(request_with("hi", max_tokens=100), [])
    assert 100 <= short < 120
    assert estimate(request_with("x" * 4000, max_tokens=100), []) == pytest.approx(short + 1000, abs=2)
    grown = estimate(request_with("hi", max_tokens=100), [Message(role="assistant", content="y" * 400)])
    assert grown == pytest.approx(short + 100, abs=2)
    assert estimate(request_with("hi"), []) == short - 100 + UNBOUNDED_OUTPUT_TOKENS


def test_an_image_counts_as_an_image_and_not_as_its_base64() -> None:
    picture = ImagePart(source=Base64Source(media_type="image/png", data="A" * 10**6))
    assert estimate(request_with([picture], max_tokens=1), []) < 2 * IMAGE_TOKENS


def test_a_successful_call_used_the_reported_tokens() -> None:
    assert tally(200, START, END).used == 17


def test_what_breaks_off_after_the_providers_last_word_changes_nothing() -> None:
    received = tally(200, START, END, ended=False)
    assert (received.final_count, received.used) == (True, 17)


def test_the_tokens_of_a_call_that_broke_off_are_unknown() -> None:
    assert not tally(200, START, ended=False).final_count
    assert tally(200, START, ended=False).used is None
    assert tally(200, START).used is None


def test_a_refused_call_used_no_tokens_and_reports_the_wait() -> None:
    refused = tally(429, BODY, wait="7")
    assert refused.used == 0
    assert refused.error
    assert refused.error.retry_after_s == 7


def test_a_call_that_got_no_answer_took_nothing() -> None:
    assert TokenTally().used == 0

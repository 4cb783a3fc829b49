"""What is sent over a WebSocket, and what its messages say."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.events import normalized as n
from tokenbus.events.quirks import Quirks
from tokenbus.providers.api import SteerSeen
from tokenbus.providers.openai_responses import provider
from tokenbus.providers.openai_responses.steering import steering

GOES_ON = b'{"type":"response.output_text.delta","item_id":"m","output_index":0,"content_index":0,"delta":"x"}'


def test_a_response_begins_with_the_body_of_its_call() -> None:
    sent = steering.begin(b'{"model":"m","input":[{"role":"user","content":"hi"}],"stream":true,"store":false}')
    assert msgspec.json.decode(sent) == {
        "type": "response.create",
        "model": "m",
        "input": [{"role": "user", "content": "hi"}],
        "store": False,
    }


def test_it_is_steered_with_the_input_of_another_body() -> None:
    sent = steering.steer("resp_1", b'{"model":"m","input":[{"role":"user","content":"shorter"}]}')
    steered = {"previous_response_id": "resp_1", "input": [{"role": "user", "content": "shorter"}]}
    assert msgspec.json.decode(sent) == {"type": "response.steer", **steered}


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        (
            b'{"type":"response.created","sequence_number":0,"response":{"id":"resp_2","previous_response_id":"resp_1"}}',
            SteerSeen(passes=True, response="resp_2"),
        ),
        (GOES_ON, SteerSeen(passes=True)),
        (b'{"type":"response.steer.accepted","sequence_number":4,"steer":{"id":"steer_1"}}', SteerSeen()),
        (b'{"type":"response.steer.pending","reason":"waiting_for_required_input","required_input":[]}', SteerSeen()),
        (
            b'{"type":"response.steer.failed","steer":{"input":"x"},"error":{"code":"response_already_completed"}}',
            SteerSeen(refused=True),
        ),
        (
            b'{"type":"response.incomplete","response":{"id":"r","incomplete_details":{"reason":"steered"}}}',
            SteerSeen(passes=True, response="r", over=True, steered=True),
        ),
        (
            b'{"type":"response.incomplete","response":{"id":"r","incomplete_details":{"reason":"max_output_tokens"}}}',
            SteerSeen(passes=True, response="r", over=True),
        ),
        (b'{"type":"error","status":429,"error":{"code":"x"}}', SteerSeen(passes=True, over=True, status=429)),
        (b"no JSON", SteerSeen(passes=True)),
        (b"[]", SteerSeen(passes=True)),
    ],
)
def test_each_message_says_what_becomes_of_the_response(message: bytes, seen: SteerSeen) -> None:
    assert steering.read(message) == seen


def test_an_end_that_is_made_here_reads_as_the_provider_s_own() -> None:
    ended = steering.ended("resp_1")
    assert steering.read(ended) == SteerSeen(passes=True, response="resp_1", over=True, steered=True)
    decoder = provider.decoder(status=200, headers={}, stream=True, quirks=Quirks())
    assert decoder.feed(b"data: %b\n\n" % ended)[-1] == n.Done("pause", "incomplete:steered")


def test_an_error_over_a_web_socket_says_what_one_over_http_says() -> None:
    error = b'{"type":"error","status":400,"error":{"type":"invalid_request_error","code":"too_long","message":"No."}}'
    stream = provider.decoder(status=200, headers={}, stream=True, quirks=Quirks())
    (failed,) = stream.feed(b"data: %b\n\n" % error)
    assert isinstance(failed, n.Failed)
    assert (failed.error.code, failed.error.message) == ("too_long", "No.")
    whole = provider.decoder(status=400, headers={}, stream=True, quirks=Quirks())
    whole.feed(error)
    (refused,) = whole.end()
    assert isinstance(refused, n.Failed)
    assert (refused.error.code, refused.error.kind) == ("too_long", "invalid_request")

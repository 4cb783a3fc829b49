"""A provider's event that becomes more pieces than a worker could decode at once."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tokenbus.events.normalized import Failed
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.providers import registry
from tokenbus.providers.response import end_of_stream
from tokenbus.providers.response.decoder import MAX_EVENTS


def _parts(number: int) -> list[dict[str, Any]]:
    return [{"text": "x", "thought": bool(n % 2)} for n in range(number)]


EVENTS: list[tuple[ApiName, dict[str, Any]]] = [
    ("gemini", {"candidates": [{"content": {"parts": _parts(100_000)}, "index": 0}]}),
    ("gemini-interactions", {"status": "completed", "steps": [{"type": "thought", "signature": "s"}] * 100_000}),
    (
        "anthropic",
        {
            "type": "message",
            "role": "assistant",
            "stop_reason": "end_turn",
            "content": [{"type": "text", "text": "x"}] * 100_000,
        },
    ),
    (
        "openai-responses",
        {
            "id": "r",
            "object": "response",
            "status": "completed",
            "output": [
                {
                    "id": f"m{n}",
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "x"}],
                }
                for n in range(30_000)
            ],
        },
    ),
]


@pytest.mark.parametrize(("api", "event"), EVENTS, ids=[api for api, _ in EVENTS])
def test_it_ends_the_call_with_an_error_that_says_so(api: ApiName, event: dict[str, Any]) -> None:
    decoder = registry.get(api).decoder(status=200, headers={}, stream=False, quirks=Quirks())
    events = [*decoder.feed(json.dumps(event).encode()), *decoder.end()]
    [failed] = events
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.kind, failed.error.retryable) == ("too_large", "limit", False)
    assert f"the limit is {MAX_EVENTS}" in failed.error.message


@pytest.mark.parametrize(("api", "event"), EVENTS, ids=[api for api, _ in EVENTS])
def test_the_rest_of_it_is_not_looked_at(api: ApiName, event: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither piece by piece, nor for a cut in its middle: that takes as long as all of it."""
    looked: list[bytes] = []
    monkeypatch.setattr(end_of_stream, "is_unfinished", looked.append)
    calls = 0

    def count(frame: object, what: str, argument: object) -> None:
        nonlocal calls
        calls += what == "call"

    decoder = registry.get(api).decoder(status=200, headers={}, stream=False, quirks=Quirks())
    decoder.feed(json.dumps(event).encode())
    sys.setprofile(count)
    try:
        decoder.end()
    finally:
        sys.setprofile(None)
    assert looked == []
    assert calls < 20 * MAX_EVENTS


def test_as_many_as_the_limit_are_decoded() -> None:
    decoder = registry.get("gemini").decoder(status=200, headers={}, stream=True, quirks=Quirks())
    event = {"candidates": [{"content": {"parts": _parts(5000)}, "index": 0}]}
    for _ in range(4):
        events = decoder.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
        assert len(events) >= 3 * 5000 - 1

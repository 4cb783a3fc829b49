"""The providers by the name of their API."""

from __future__ import annotations

import pytest

from tokenbus.errors import SettingsError
from tokenbus.events.quirks import ApiName
from tokenbus.providers import registry


@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_a_provider_is_found_by_the_api_that_it_speaks(api: ApiName) -> None:
    provider = registry.get(api)
    assert provider.name == api
    name, form = provider.key_header
    assert name == name.lower()
    assert form.format("k").endswith("k")


def test_an_api_that_no_package_adds_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"unknown API 'fax': .* no installed package has it; known: anthropic, "):
        registry.get("fax")


def test_block_boundaries_and_the_end_of_the_stream_are_urgent_and_plain_text_is_not() -> None:
    def urgent(api: ApiName, data: bytes) -> bool:
        return any(mark in data for mark in registry.get(api).urgent)

    assert all(
        urgent("anthropic", b'data: {"type":"%s"}' % kind)
        for kind in (b"message_start", b"content_block_start", b"content_block_stop", b"message_stop")
    )
    assert not urgent("anthropic", b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}')
    assert urgent("openai-chat", b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}')
    assert urgent("openai-chat", b"data: [DONE]")
    assert not urgent("openai-chat", b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}')
    apis: tuple[ApiName, ...] = ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
    assert all(urgent(api, b'data: {"error":{"message":"m"}}') for api in apis)
    assert all(
        urgent("openai-responses", b'data: {"type":"response.%s"}' % kind)
        for kind in (
            b"created",
            b"output_item.added",
            b"content_part.done",
            b"output_item.done",
            b"completed",
            b"failed",
        )
    )
    assert not urgent("openai-responses", b'data: {"type":"response.output_text.delta","delta":"a"}')
    assert urgent("gemini", b'data: {"candidates":[{"content":{"parts":[{"functionCall":{}}]}}]}')
    assert urgent("gemini", b'data: {"candidates":[{"finishReason":"STOP"}]}')
    assert not urgent("gemini", b'data: {"candidates":[{"content":{"parts":[{"text":"a"}]}}]}')

"""Tokens of all providers in one meaning."""

from __future__ import annotations

import pytest

from tokenbus.events.usage import Usage
from tokenbus_services.pricing import token_counts


@pytest.mark.parametrize(
    ("api", "fresh", "output"),
    [
        ("anthropic", 100, 50),  # cached input is reported beside the rest
        ("gemini", 60, 70),  # so is reasoning
        ("gemini-interactions", 60, 70),
        ("openai-chat", 60, 50),
        ("openai-responses", 60, 50),
        ("", 60, 50),  # the settings no longer have the provider
    ],
)
def test_input_and_output_are_whole_whatever_the_provider_reports_apart(api: str, fresh: int, output: int) -> None:
    counts = token_counts(Usage(input=100, output=50, cache_read=30, cache_write=10, reasoning=20), api)
    assert (counts.fresh, counts.output) == (fresh, output)
    assert counts.input == fresh + 40
    assert counts.total == fresh + 40 + output


def test_what_was_not_reported_is_nothing() -> None:
    assert token_counts(None, "gemini").total == 0
    assert token_counts(Usage(input=1, cache_read=3), "openai-chat").fresh == 0

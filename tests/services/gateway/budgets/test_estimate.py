"""What a budget reserves for a request: at least what its calls can cost."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    Fallback,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    TextPart,
    Thinking,
    ToolResultPart,
)
from tokenbus_services.gateway.budgets.estimate import (
    DOCUMENT_TOKENS,
    IMAGE_TOKENS,
    MADE_IMAGE_TOKENS,
    most_cost_nano,
)
from tokenbus_services.pricing import PriceTable
from tokenbus_services.settings.tables.gateway import PriceSettings

PRICES = PriceTable(
    {
        "in/": PriceSettings(input=1, output=0),
        "cached/": PriceSettings(input=1, output=0, cache_write=10),
        "out/": PriceSettings(input=0, output=1, max_output=5_000),
    }
)
PER_TOKEN = 1_000
"""Billionths, at a price of 1 for a million."""
MEDIUM = Base64Source(media_type="image/png", data="A" * 1_000_000)


def tokens_of(provider: str, content: Any = "hello", *, bus_runs_tools: bool = False, **fields: Any) -> float:
    """What is reserved for a request, in tokens at a price of 1."""
    messages = [Message(role="user", content=content)]
    request = Generate(provider=provider, model="m", messages=messages, **fields)
    return most_cost_nano(request, PRICES, bus_runs_tools=bus_runs_tools) / PER_TOKEN


@pytest.mark.parametrize("text", ["x" * 10_000, "語" * 10_000, "\U0001f980" * 10_000], ids=["latin", "han", "emoji"])
def test_text_counts_a_token_for_each_byte_and_little_more(text: str) -> None:
    size = len(text.encode())
    assert size <= tokens_of("in", text) <= size + 500
    assert size <= tokens_of("in", [TextPart(text=text)]) <= size + 500
    assert size <= tokens_of("in", [ToolResultPart(tool_id="t", content=text)]) <= size + 500
    assert size <= tokens_of("in", system=text) <= size + 500
    assert size <= tokens_of("in", extra={"x": text}) <= size + 500


def test_media_count_by_number_and_not_by_size() -> None:
    image = ImagePart(source=MEDIUM)
    assert IMAGE_TOKENS <= tokens_of("in", [image]) <= IMAGE_TOKENS + 500
    inside = ToolResultPart(tool_id="t", content=[image, TextPart(text="x")])
    assert IMAGE_TOKENS <= tokens_of("in", [inside]) <= IMAGE_TOKENS + 500
    assert DOCUMENT_TOKENS <= tokens_of("in", [DocumentPart(source=MEDIUM)]) <= DOCUMENT_TOKENS + 500


def test_text_counts_wherever_a_request_has_it() -> None:
    text = "x" * 10_000
    own: dict[str, dict[str, object]] = {"anthropic": {"content": text}}
    places: list[Message] = [
        Message(role="user", content="hello", extra=own),
        Message(role="user", content="hello", participant=text),
        Message(role="user", content=[TextPart(text="x", extra=own)]),
        Message(role="user", content=[ImagePart(source=MEDIUM, extra=own)]),
        Message(role="user", content=[DocumentPart(source=MEDIUM, context=text)]),
        Message(role="user", content=[DocumentPart(source=MEDIUM, title=text)]),
        Message(role="tool", content=[ToolResultPart(tool_id="t", content="x", extra=own)]),
    ]
    for message in places:
        request = Generate(provider="in", model="m", messages=[message])
        counted = most_cost_nano(request, PRICES, bus_runs_tools=False) / PER_TOKEN
        media = counted // DOCUMENT_TOKENS * DOCUMENT_TOKENS or counted // 15_000 * IMAGE_TOKENS
        assert 10_000 <= counted - media <= 10_500, message
    assert tokens_of("in", fallback=[Fallback(provider="in", model="m", extra={"x": text})]) >= 10_000


def test_a_document_of_text_counts_its_bytes() -> None:
    source = Base64Source(media_type="text/plain", data="A" * 4_000_000)
    assert 3_000_000 <= tokens_of("in", [DocumentPart(source=source)]) <= 3_000_500


def test_images_that_the_model_makes_count() -> None:
    assert tokens_of("out", max_tokens=7, images=ImageOptions(count=3)) == 7 + 3 * MADE_IMAGE_TOKENS
    assert tokens_of("out", images=ImageOptions(count=3)) == 3 * MADE_IMAGE_TOKENS
    assert tokens_of("out", images=ImageOptions()) == MADE_IMAGE_TOKENS


def test_the_answer_counts_as_long_as_it_may_be() -> None:
    assert tokens_of("out", max_tokens=7) == 7
    assert tokens_of("out") == 5_000
    assert tokens_of("out", thinking=Thinking(budget_tokens=300)) == 5_300


def test_the_dearest_way_to_answer_counts() -> None:
    assert tokens_of("cached", "x" * 1000) == pytest.approx(10 * tokens_of("in", "x" * 1000))
    assert tokens_of("in", max_tokens=9_000, fallback=[Fallback(provider="out", model="m")]) == 9_000
    assert tokens_of("free", max_tokens=9_000) == 0


def test_each_call_that_results_of_tools_may_lead_to_counts() -> None:
    more: dict[str, Any] = {"max_tokens": 100, "max_tool_depth": 3}
    assert tokens_of("out", bus_runs_tools=True, **more) == 400
    assert tokens_of("out", bus_runs_tools=False, **more) == 100

"""Requests of Gemini's Interactions API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.providers.request_builder import HI, WEATHER, RequestBuilder
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    ExtraPart,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    OutputSchema,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
)
from tokenbus.providers import gemini_interactions
from tokenbus.providers.gemini_interactions.stream import API, CONTINUATION

BUILDER = RequestBuilder(gemini_interactions.provider, model="gemini-3.5-flash")
body, refused = BUILDER.body, BUILDER.refused
OWN = {"api": API, "provider": "p"}


def assistant(*parts: Any) -> Message:
    return Message(role="assistant", content=list(parts))


def text_step(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "content": [{"type": "text", "text": text}]}


def test_the_shortest_request_is_a_step_that_is_not_stored() -> None:
    assert body() == {
        "model": "gemini-3.5-flash",
        "input": [text_step("user_input", "Hi")],
        "stream": True,
        "store": False,
    }
    assert BUILDER.build(Generate(provider="p", model="m", messages=[HI])).call.path == "/interactions"


def test_a_turn_goes_back_with_its_signatures_citations_and_items_in_order() -> None:
    search = '{"type":"google_search_call","id":"g","arguments":{"queries":["q"]}}'
    said = assistant(
        ThinkingPart(text="Hm", opaque={**OWN, "thought_signature": "c2ln"}),
        ExtraPart(name=f"{API}.google_search_call", json=search),
        TextPart(text="It is", opaque={**OWN, "citations": '[{"type":"url_citation"}]'}),
        ImagePart(source=Base64Source(media_type="image/png", data="AAAA"), opaque=OWN),
        ToolCallPart(tool_id="c", tool_name="weather", arguments='{"city":"Bonn"}', opaque=OWN),
    )
    result = Message(role="tool", content=[ToolResultPart(tool_id="c", content="Rain")])
    assert body(HI, history=[said, result])["input"][1:] == [
        {"type": "thought", "signature": "c2ln", "summary": [{"type": "text", "text": "Hm"}]},
        {"type": "google_search_call", "id": "g", "arguments": {"queries": ["q"]}},
        {
            "type": "model_output",
            "content": [
                {"type": "text", "text": "It is", "annotations": [{"type": "url_citation"}]},
                {"type": "image", "mime_type": "image/png", "data": "AAAA"},
            ],
        },
        {"type": "function_call", "id": "c", "name": "weather", "arguments": {"city": "Bonn"}},
        {"type": "function_result", "call_id": "c", "name": "weather", "result": "Rain"},
    ]


def test_a_thought_without_its_text_goes_back_by_its_signature_alone() -> None:
    said = assistant(ThinkingPart(text="", opaque={**OWN, "thought_signature": "c2ln"}), TextPart(text="Yes"))
    assert body(HI, said, HI)["input"][1] == {"type": "thought", "signature": "c2ln"}


@pytest.mark.parametrize(
    ("media_type", "kind"),
    [("application/pdf", "document"), ("audio/wav", "audio"), ("video/mp4", "video"), ("image/png", "image")],
)
def test_a_document_is_content_of_the_kind_that_its_media_type_says(media_type: str, kind: str) -> None:
    given = DocumentPart(source=Base64Source(media_type=media_type, data="AAAA"))
    [step] = body(Message(role="user", content=[given]))["input"]
    assert step["content"] == [{"type": kind, "mime_type": media_type, "data": "AAAA"}]


def test_all_options_have_their_places() -> None:
    made = body(
        tools=[WEATHER],
        tool_choice=ToolChoice(name="weather"),
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["END"],
        thinking=Thinking(budget_tokens=2000, display="omitted"),
        output_schema=OutputSchema(schema={"type": "object"}),
        system="Be kind.",
    )
    assert made["tools"] == [
        {"type": "function", "name": "weather", "description": "The weather.", "parameters": WEATHER.parameters}
    ]
    assert made["generation_config"] == {
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop_sequences": ["END"],
        "thinking_level": "low",
        "thinking_summaries": "none",
        "tool_choice": {"allowed_tools": {"mode": "any", "tools": ["weather"]}},
    }
    assert made["response_format"] == {"type": "text", "mime_type": "application/json", "schema": {"type": "object"}}
    assert made["system_instruction"] == "Be kind."


def test_images_are_asked_for_beside_the_text() -> None:
    made = body(images=ImageOptions(size="2K", aspect_ratio="16:9"))
    assert made["response_format"] == [{"type": "text"}, {"type": "image", "aspect_ratio": "16:9", "image_size": "2K"}]
    assert refused(images=ImageOptions(quality="low")) == "images.quality"


def test_thinking_cannot_be_turned_off_and_a_note_says_so() -> None:
    built = BUILDER.build(Generate(provider="p", model="m", messages=[HI], thinking=Thinking(enabled=False)))
    assert b'"generation_config":{"thinking_level":"minimal"}' in built.call.body
    assert built.notes == ("thinking: this API cannot turn it off; its least level, 'minimal', was asked for",)


def test_an_interaction_builds_on_an_earlier_one_and_an_agent_stands_in_for_the_model() -> None:
    made = body(extra={"previous_interaction_id": "v1_a", "store": True})
    assert (made["previous_interaction_id"], made["store"]) == ("v1_a", True)
    made = body(extra={"agent": "deep-research", "background": True})
    assert (made["agent"], made["background"], made["store"]) == ("deep-research", True, True)
    assert "model" not in made
    assert body(extra={"background": True}, stream=False)["store"]


def test_a_pause_is_continued_with_its_token_and_the_input_that_it_had() -> None:
    paused = assistant(ExtraPart(name=CONTINUATION, json='"tok"'), TextPart(text="It is"))
    made = body(HI, history=[paused])
    assert (made["continuation_token"], made["input"]) == ("tok", [text_step("user_input", "Hi")])
    call = assistant(
        ExtraPart(name=CONTINUATION, json='"tok"'), ToolCallPart(tool_id="c", tool_name="weather", arguments="{}")
    )
    result = Message(role="tool", content=[ToolResultPart(tool_id="c", content="Rain")])
    later = body(HI, history=[paused, call, result])
    assert "continuation_token" not in later
    assert [step["type"] for step in later["input"]] == [
        *("user_input", "model_output", "function_call", "function_result"),
    ]


def test_system_text_in_the_middle_moves_to_the_front_with_a_note() -> None:
    request = Generate(provider="p", model="m", messages=[HI, Message(role="system", content="Be brief.")])
    built = BUILDER.build(request)
    assert b'"system_instruction":"Be brief."' in built.call.body
    assert built.notes == ("messages[1]: system text was moved to the front, its only place in this API",)

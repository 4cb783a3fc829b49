"""A history that another provider's model wrote: what goes along, what is converted, what is left out, with a note."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.providers.request.test_conversation import call, message_of, result, shape, spoken
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import (
    Base64Source,
    ContentPart,
    DocumentPart,
    ExtraPart,
    Generate,
    ImagePart,
    Message,
    OutputSchema,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.providers import registry
from tokenbus.providers.request.conversation import Spoken, Takes

ANTHROPIC = Takes(api="anthropic", thinking=("signature", "redacted"), unique_ids=True)
RESPONSES = Takes(api="openai-responses", thinking=("encrypted",), model_images=True, unique_ids=True)
GEMINI = Takes(api="gemini", thinking=("thought_signature",), model_images=True)
CHAT = Takes(api="openai-chat", thinking=("reasoning_details",), names=True)
OF_OPENAI = {"api": "openai-responses", "provider": "p"}
OF_ANOTHER = {"api": "openai-responses", "provider": "azure"}
PNG = Base64Source(media_type="image/png", data="AAAA")


def built(api: ApiName, *messages: Message, **fields: Any) -> tuple[Any, tuple[str, ...]]:
    request = Generate(**{"provider": "p", "model": "m", "messages": list(messages), **fields})
    made = registry.get(api).build(request, [], Quirks())
    return msgspec.json.decode(made.call.body), made.notes


def parts_of(message: Spoken) -> list[ContentPart]:
    return message.parts


# --- opaque data --------------------------------------------------------------------------------------------------


def test_opaque_data_go_back_to_the_provider_that_they_are_of_without_the_words_that_say_so() -> None:
    own = message_of(
        "assistant",
        ThinkingPart(text="Hm", opaque={"encrypted": "e", **OF_OPENAI}),
        TextPart(text="Yes", opaque={"item_id": "msg_1", "citations": "[]", **OF_OPENAI}),
    )
    [message], notes = spoken(own, takes=RESPONSES)
    assert parts_of(message) == [
        ThinkingPart(text="Hm", opaque={"encrypted": "e"}),
        TextPart(text="Yes", opaque={"item_id": "msg_1", "citations": "[]"}),
    ]
    assert notes == ()


@pytest.mark.parametrize("origin", [{"api": "anthropic", "provider": "p"}, OF_ANOTHER])
def test_those_of_another_provider_are_left_out_with_a_note_though_it_speaks_the_same_api(
    origin: dict[str, str],
) -> None:
    foreign = message_of(
        "assistant",
        ThinkingPart(text="Hm", signature="s", opaque={"encrypted": "e", **origin}),
        TextPart(text="Yes", opaque={"citations": "[]", **origin}),
        ToolCallPart(tool_id="a", tool_name="f", arguments="{}", opaque={"fields": '{"caller":1}', **origin}),
    )
    [message, _], notes = spoken(foreign, message_of("tool", result("a")), takes=RESPONSES)
    assert parts_of(message) == [TextPart(text="Yes"), ToolCallPart(tool_id="a", tool_name="f", arguments="{}")]
    maker = origin["provider"]
    assert notes == (
        f"messages[0]: thinking of {maker} was left out: other providers do not accept it",
        f"messages[0]: citations of {maker} were left out",
    )


def test_the_data_names_of_an_older_history_give_its_provider() -> None:
    signed = message_of("assistant", ThinkingPart(text="Hm", signature="s"), "Yes")
    assert shape(spoken(signed, takes=GEMINI)[0]) == [("assistant", ["Yes"])]
    assert shape(spoken(signed, takes=ANTHROPIC)[0]) == [("assistant", ["ThinkingPart", "Yes"])]


def test_foreign_thinking_becomes_text_if_the_request_sets_it() -> None:
    foreign = message_of("assistant", ThinkingPart(text="Hm", signature="s", opaque=dict(OF_ANOTHER)), "Yes")
    [message], _ = spoken(foreign, takes=ANTHROPIC, unsigned_thinking="text")
    assert parts_of(message)[0] == TextPart(text="<thinking>Hm</thinking>")


def test_the_parts_of_one_reasoning_stay_together() -> None:
    own = message_of(
        "assistant",
        ThinkingPart(text="One", opaque={"encrypted": "e", "item_id": "rs_1", **OF_OPENAI}),
        ThinkingPart(text="Two", opaque={"item_id": "rs_1", **OF_OPENAI}),
        ThinkingPart(text="Three", opaque={"item_id": "rs_2", **OF_OPENAI}),
        "Yes",
    )
    [message], _ = spoken(own, takes=RESPONSES)
    assert [part.text for part in parts_of(message) if isinstance(part, ThinkingPart)] == ["One", "Two"]


def test_final_thinking_is_left_out_unless_the_model_continues_it() -> None:
    thought = message_of("assistant", "So.", ThinkingPart(text="Hm", signature="s"))
    messages, notes = spoken(thought, message_of("user", "Well?"), takes=ANTHROPIC)
    assert shape(messages) == [("assistant", ["So."]), ("user", ["Well?"])]
    assert notes == ("messages[0]: thinking at the end of a message was left out",)
    messages, notes = spoken(message_of("user", "Hi"), history=[thought], takes=ANTHROPIC)
    assert shape(messages)[1] == ("assistant", ["So.", "ThinkingPart"]), "a paused turn goes on from there"
    assert notes == ()


def test_an_item_of_another_api_is_left_out_with_a_note() -> None:
    item = ExtraPart(name="anthropic.server_tool_use", json="{}")
    messages, notes = spoken(message_of("assistant", item, "Yes"), takes=CHAT)
    assert shape(messages) == [("assistant", ["Yes"])]
    [note] = notes
    assert note.startswith("messages[0]: an item of anthropic (anthropic.server_tool_use) was left out")


def test_many_places_share_one_note() -> None:
    messages = [message_of("assistant", ThinkingPart(text="Hm"), "Yes") for _ in range(6)]
    _, notes = spoken(*messages, takes=GEMINI)
    [note] = notes
    assert note.startswith("messages[0], messages[1], messages[2] and 3 more: thinking was left out")


# --- images of the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_an_image_of_another_providers_model_goes_as_the_users_after_the_results_of_its_calls(api: ApiName) -> None:
    made = message_of("assistant", ImagePart(source=PNG, opaque={"api": "x", "provider": "y"}), "Here.", call("a"))
    body, notes = built(
        api, message_of("user", "Draw"), made, message_of("tool", result("a")), message_of("user", "Thanks")
    )
    turns = body.get("messages") or body.get("input") or body["contents"]
    text = [str(turn) for turn in turns]
    [image] = [i for i, turn in enumerate(text) if "AAAA" in turn]
    [answer] = [i for i, turn in enumerate(text) if "ok" in turn]
    assert turns[image].get("role", turns[image].get("type")) in ("user", "user_input")
    assert image >= answer, "results follow right after their calls"
    assert "Images that the assistant made:" in text[image]
    assert "messages[1]: the model's images are sent as user images" in notes


def test_an_image_of_its_own_goes_back_as_the_models() -> None:
    own = message_of("assistant", ImagePart(source=PNG, opaque={"api": "gemini", "provider": "p"}), "Here.")
    messages, notes = spoken(own, takes=GEMINI)
    assert shape(messages) == [("assistant", ["ImagePart", "Here."])]
    assert notes == ()


# --- tool ids -----------------------------------------------------------------------------------------------------


def ids(messages: list[Spoken]) -> list[str]:
    parts = [part for message in messages for part in message.parts]
    return [part.tool_id for part in parts if isinstance(part, ToolCallPart | ToolResultPart)]


KIMI = "functions.weather:0"
REPEATED = [message_of("assistant", call(KIMI)), message_of("tool", result(KIMI, "one"))] * 3


def test_repeated_tool_ids_are_made_unique_if_the_api_requires_it_and_results_match_their_calls() -> None:
    messages, notes = spoken(*REPEATED, takes=ANTHROPIC)
    assert ids(messages) == [KIMI, KIMI, f"{KIMI}_2", f"{KIMI}_2", f"{KIMI}_3", f"{KIMI}_3"]
    assert notes == (
        f"messages[2]: the tool id '{KIMI}' is already used by an earlier call; sent as '{KIMI}_2'",
        f"messages[4]: the tool id '{KIMI}' is already used by an earlier call; sent as '{KIMI}_3'",
    )
    assert spoken(*REPEATED, takes=CHAT)[1] == (), "Chat Completions takes them as they are"


def test_anthropic_gets_no_tool_id_twice_in_its_own_letters() -> None:
    body, _ = built("anthropic", message_of("user", "Hi"), *REPEATED)
    blocks = [block for message in body["messages"] for block in message["content"]]
    used = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(used)) == len(used) == 3
    assert [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"] == used


@pytest.mark.parametrize("takes", [ANTHROPIC, CHAT, GEMINI])
def test_two_calls_of_one_message_never_share_an_id(takes: Takes) -> None:
    messages, _ = spoken(
        message_of("assistant", call("a"), call("a"), call("a_2")),
        message_of("tool", result("a", "1"), result("a", "2")),
        takes=takes,
    )
    called, answered = ids(messages)[:3], ids(messages)[3:]
    assert len(set(called)) == 3
    assert answered == called
    contents = [part.content for part in messages[1].parts if isinstance(part, ToolResultPart)]
    assert contents[:2] == ["1", "2"]


# --- media types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["image/jpg", "IMAGE/JPEG", "image/jpeg; q=1"])
@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_media_types_go_in_the_one_spelling_that_every_api_takes(api: ApiName, written: str) -> None:
    source = Base64Source(media_type=written, data="AAAA")
    body, notes = built(api, message_of("user", "Look", ImagePart(source=source)))
    assert "image/jpeg" in str(body)
    assert written not in str(body)
    assert notes == (f"messages[0].content[1].source.media_type: {written!r} is sent as 'image/jpeg'",)


def test_those_inside_of_tool_results_and_of_documents_too() -> None:
    image = ImagePart(source=Base64Source(media_type="IMAGE/PNG", data="AAAA"))
    answer = ToolResultPart(tool_id="a", content=[image])
    document = DocumentPart(source=Base64Source(media_type="Application/PDF;v=1", data="AAAA"))
    body, notes = built(
        "anthropic", message_of("user", document), message_of("assistant", call("a")), message_of("tool", answer)
    )
    assert [note.partition(":")[0] for note in notes] == [
        "messages[0].content[0].source.media_type",
        "messages[2].content[0].content[0].source.media_type",
    ]
    assert "'image/png'" in str(body)
    assert "'application/pdf'" in str(body)


# --- speakers -----------------------------------------------------------------------------------------------------


def by(name: str | None, text: str, role: Any = "user") -> Message:
    return Message(role=role, content=text, participant=name)


def test_names_go_into_the_field_of_chat_completions_made_to_fit_and_each_speakers_another_one() -> None:
    body, notes = built(
        "openai-chat", by("Ann B", "1"), by("Ann_B", "2"), by("Ann<B", "3"), by(None, "4"), by("Zoë", "5")
    )
    assert [message.get("name") for message in body["messages"]] == ["Ann_B_2", "Ann_B", "Ann_B_3", None, "Zoë"]
    assert notes == (
        "messages[0]: the participant 'Ann B' is sent as 'Ann_B_2' to fit the API",
        "messages[2]: the participant 'Ann<B' is sent as 'Ann_B_3' to fit the API",
    )


@pytest.mark.parametrize("api", ["anthropic", "openai-responses", "gemini"])
def test_an_api_without_names_says_in_a_note_what_was_dropped(api: ApiName) -> None:
    _, notes = built(api, by("Ann", "Hi"), by("Bob", "Ho"))
    [note] = notes
    assert note.startswith("messages[0], messages[1]: this API has no field for participant names")


def test_the_models_own_name_is_dropped_without_a_word_for_its_role_says_who_it_is() -> None:
    _, notes = built("anthropic", by(None, "Hi"), by("Claude", "Ho", "assistant"), by(None, "Hm"), participant="Claude")
    assert notes == ()
    _, notes = built("anthropic", by(None, "Hi"), by("Zed", "Ho", "assistant"), by(None, "Hm"), participant="Claude")
    assert len(notes) == 1


@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_the_option_puts_names_into_the_text_and_no_two_speakers_are_one(api: ApiName) -> None:
    body, notes = built(
        api,
        *(by("Ann", "Hi"), by("Bob", "Ho"), by(None, "Hm")),
        *(by("Claude", "Yes", "assistant"), by(None, "Alone"), by(None, "And again")),
        names_in_text=True,
        participant="Claude",
    )
    text = str(body)
    for words in ("'Ann: Hi'", "'Bob: Ho'", "'User: Hm'", "'Yes'", "'Alone'", "'And again'"):
        assert words in text
    assert "'name'" not in text
    assert notes == ()


def test_in_the_text_another_assistant_and_the_model_itself_have_different_names() -> None:
    messages = [by("Zed", "One", "assistant"), by(None, "Two", "assistant"), by(None, "Hm")]
    spoken_, _ = spoken(*messages, names_in_text=True, participant="Claude")
    assert shape(spoken_) == [("assistant", ["Zed: One"]), ("assistant", ["Claude: Two"]), ("user", ["Hm"])]


def test_a_message_that_begins_with_an_image_has_its_speakers_name_before_it() -> None:
    shown = Message(role="user", content=[ImagePart(source=PNG), TextPart(text="See?")], participant="Ann")
    [message], _ = spoken(shown, names_in_text=True)
    assert shape([message]) == [("user", ["Ann:", "ImagePart", "See?"])]


# --- thinking within a budget -------------------------------------------------------------------------------------


def test_anthropic_is_not_asked_to_think_about_results_of_calls_that_another_model_made() -> None:
    fields = {"model": "claude-sonnet-4-5", "thinking": Thinking(budget_tokens=2000)}
    begun = [message_of("user", "Hi"), message_of("assistant", call("a")), message_of("tool", result("a"))]
    body, notes = built("anthropic", *begun, **fields, output_schema=OutputSchema(schema={"type": "object"}))
    assert body["thinking"] == {"type": "disabled"}
    assert body["output_config"] == {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert [note.partition(":")[0] for note in notes] == ["thinking was turned off"]
    signed = message_of("assistant", ThinkingPart(text="Hm", signature="s"), call("a"))
    for fine in ([begun[0], signed, begun[2]], [*begun, message_of("assistant", "Yes"), message_of("user", "More")]):
        body, notes = built("anthropic", *fine, **fields)
        assert body["thinking"]["type"] == "enabled"
        assert notes == ()
    assert built("anthropic", *begun, model="claude-opus-4-7", thinking=Thinking())[0]["thinking"] == {
        "type": "adaptive"
    }

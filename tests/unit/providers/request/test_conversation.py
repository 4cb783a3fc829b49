"""The history that a request is built from: checked, and every tool call with its result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import (
    BlobSource,
    ContentPart,
    ExtraPart,
    Generate,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.providers.request.conversation import NO_RESULT, Spoken, Takes, conversation, own_extra

PLAIN = Takes(api="anthropic", thinking=("signature", "redacted"))


def spoken(
    *messages: Message, history: list[Message] | None = None, takes: Takes = PLAIN, **fields: Any
) -> tuple[list[Spoken], tuple[str, ...]]:
    request = Generate(provider="p", model="m", messages=list(messages), **fields)
    return conversation(request, history or [], takes)


def message_of(role: str, *parts: ContentPart | str) -> Message:
    content = [TextPart(text=part) if isinstance(part, str) else part for part in parts]
    return Message(role=role, content=content)  # pyright: ignore[reportArgumentType]


def call(tool_id: str) -> ToolCallPart:
    return ToolCallPart(tool_id=tool_id, tool_name="f", arguments="{}")


def result(tool_id: str, content: str = "ok") -> ToolResultPart:
    return ToolResultPart(tool_id=tool_id, content=content)


def shape(messages: list[Spoken]) -> list[tuple[str, list[str]]]:
    """Roles, and the parts in a word each."""

    def word(part: ContentPart) -> str:
        match part:
            case TextPart():
                return part.text
            case ToolCallPart():
                return f"call {part.tool_id}"
            case ToolResultPart():
                return f"result {part.tool_id}: {part.content}"
            case _:
                return type(part).__name__

    return [(message.role, [word(part) for part in message.parts]) for message in messages]


def test_a_sound_history_stays_as_it_is() -> None:
    messages, notes = spoken(
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi", participant="Ann"),
        history=[
            message_of("assistant", ThinkingPart(text="Hm", signature="s"), "Wait.", call("a"), call("b")),
            message_of("tool", result("a"), result("b")),
        ],
        takes=msgspec.structs.replace(PLAIN, names=True),
    )
    assert shape(messages) == [
        ("system", ["Be brief."]),
        ("user", ["Hi"]),
        ("assistant", ["ThinkingPart", "Wait.", "call a", "call b"]),
        ("tool", ["result a: ok", "result b: ok"]),
    ]
    assert [message.where for message in messages] == ["messages[0]", "messages[1]", "history[0]", "history[0]"]
    assert messages[1].participant == "Ann"
    assert notes == ()


def test_results_are_in_the_order_of_their_calls_for_every_order_of_messages() -> None:
    messages, notes = spoken(
        message_of("assistant", call("a"), call("b")),
        message_of("tool", result("b")),
        message_of("user", result("a"), "go on"),
    )
    assert shape(messages) == [
        ("assistant", ["call a", "call b"]),
        ("tool", ["result a: ok", "result b: ok"]),
        ("user", ["go on"]),
    ]
    assert notes == ()


def test_a_call_without_a_result_gets_an_error_result_and_a_note() -> None:
    messages, notes = spoken(
        message_of("assistant", call("a"), call("b")), message_of("tool", result("b")), message_of("user", "So?")
    )
    assert shape(messages)[1] == ("tool", [f"result a: {NO_RESULT}", "result b: ok"])
    put_in = messages[1].parts[0]
    assert isinstance(put_in, ToolResultPart)
    assert put_in.is_error
    assert notes == ("messages[0]: the call a of f has no result; an error result was inserted",)


def test_a_result_without_a_call_is_left_out_with_a_note() -> None:
    messages, notes = spoken(message_of("tool", result("x")), message_of("user", "Hi", result("y")))
    assert shape(messages) == [("user", ["Hi"])]
    assert notes == (
        "messages[0]: the result of call x has no call before it and was left out",
        "messages[1]: the result of call y has no call before it and was left out",
    )


def test_a_second_result_of_a_call_is_left_out() -> None:
    messages, notes = spoken(message_of("assistant", call("a")), message_of("tool", result("a", "1"), result("a", "2")))
    assert shape(messages)[1] == ("tool", ["result a: 1"])
    assert len(notes) == 1


def test_a_result_that_comes_late_is_moved_to_its_call_with_a_note() -> None:
    messages, notes = spoken(
        message_of("assistant", call("a")), message_of("user", "Hurry"), message_of("tool", result("a"))
    )
    assert shape(messages) == [("assistant", ["call a"]), ("tool", ["result a: ok"]), ("user", ["Hurry"])]
    assert notes == ("messages[2]: the result of call a was moved to its call",)


def test_an_id_may_be_used_again_in_a_later_turn() -> None:
    messages, notes = spoken(
        message_of("assistant", call("a")),
        message_of("tool", result("a", "first")),
        message_of("assistant", call("a")),
        message_of("tool", result("a", "second")),
    )
    assert shape(messages)[1] == ("tool", ["result a: first"])
    assert shape(messages)[3] == ("tool", ["result a: second"])
    assert notes == ()


def test_empty_texts_and_empty_messages_vanish() -> None:
    messages, _ = spoken(message_of("user", "", "Hi"), message_of("assistant", ""), Message(role="user", content=""))
    assert shape(messages) == [("user", ["Hi"])]


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (message_of("user", call("a")), "messages[0].content[0]"),
        (message_of("user", "x", ThinkingPart()), "messages[0].content[1]"),
        (message_of("assistant", result("a")), "messages[0].content[0]"),
        (
            message_of("system", ImagePart(source=BlobSource(blob_id="b", media_type="image/png"))),
            "messages[0].content[0]",
        ),
        (Message(role="tool", content="ok"), "messages[0]"),
        (
            message_of("user", ImagePart(source=BlobSource(blob_id="b", media_type="image/png"))),
            "messages[0].content[0]",
        ),
        (Message(role="user", content=""), "messages"),
    ],
)
def test_what_no_provider_could_take_is_refused_with_its_place(message: Message, where: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        spoken(message)
    assert refused.value.where == where


def test_a_providers_own_item_is_sent_back_to_that_provider_only() -> None:
    item = ExtraPart(name="anthropic.server_tool_use", json='{"a": 1}')
    own = own_extra(item, "anthropic", "here")
    assert own is not None
    assert bytes(own) == b'{"a": 1}'
    assert own_extra(item, "openai-chat", "here") is None
    by_hand = own_extra(ExtraPart(name="input_audio", json="{}"), "openai-chat", "here")
    assert by_hand is not None
    with pytest.raises(RequestInvalid):
        own_extra(ExtraPart(name="x", json="{"), "openai-chat", "here")


# --- thinking without a signature ---------------------------------------------------------------------------------

UNSIGNED = message_of("assistant", ThinkingPart(text="Hm."), "Yes.")


def test_unsigned_thinking_of_a_request_is_left_out_with_a_note() -> None:
    messages, notes = spoken(message_of("user", "Hi"), UNSIGNED)
    assert shape(messages) == [("user", ["Hi"]), ("assistant", ["Yes."])]
    assert notes == ("messages[1]: thinking was left out: this provider accepts it only with its signature",)


def test_a_note_on_unsigned_thinking_names_no_signature_of_an_api_that_has_none() -> None:
    _, notes = spoken(
        message_of("user", "Hi"), UNSIGNED, takes=Takes(api="openai-chat", thinking=("reasoning_details",))
    )
    assert len(notes) == 1
    assert "signature" not in notes[0]


def test_unsigned_thinking_becomes_text_if_the_request_sets_it_and_a_note_reports_it() -> None:
    [message], notes = spoken(UNSIGNED, unsigned_thinking="text")
    assert message.parts == [TextPart(text="<thinking>Hm.</thinking>"), TextPart(text="Yes.")]
    assert notes == ("messages[0]: thinking without a signature was turned into text",)


def test_thinking_is_sent_back_unchanged_if_it_is_signed_or_its_provider_accepts_it_unsigned() -> None:
    signed = message_of(
        "assistant", ThinkingPart(text="Hm.", signature="s"), ThinkingPart(opaque={"redacted": "x"}), "Yes."
    )
    assert spoken(signed)[0][0].parts == signed.content
    plain = Takes(api="openai-chat", plain_thinking=True)
    assert spoken(UNSIGNED, takes=plain)[0][0].parts == UNSIGNED.content


def test_what_the_runs_own_turns_thought_in_plain_words_is_left_out_without_a_word() -> None:
    messages, notes = spoken(message_of("user", "Hi"), history=[UNSIGNED])
    assert shape(messages) == [("user", ["Hi"]), ("assistant", ["Yes."])]
    assert notes == ()


def test_thinking_without_a_word_and_without_a_signature_is_nothing() -> None:
    assert shape(spoken(message_of("assistant", ThinkingPart(), "Yes."))[0]) == shape(
        spoken(message_of("assistant", "Yes."))[0]
    )


def test_a_thousand_calls_of_one_id_get_an_id_and_a_result_each() -> None:
    count = 3_000
    calls = message_of("assistant", *(call("c") for _ in range(count)))
    messages, notes = spoken(
        message_of("user", "go"), calls, message_of("tool", *(result("c", f"{n}") for n in range(count)))
    )
    assert [part.content for part in messages[2].parts if isinstance(part, ToolResultPart)] == [*map(str, range(count))]
    ids = [part.tool_id for part in messages[1].parts if isinstance(part, ToolCallPart)]
    assert ids == ["c", *(f"c_{n}" for n in range(2, count + 1))]
    assert [part.tool_id for part in messages[2].parts if isinstance(part, ToolResultPart)] == ids
    assert notes

"""Which texts policies judge, and what becomes of those that they changed."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import msgspec
import pytest

from tokenbus.events.requests import Answer, Approval, Generate, SessionMessage
from tokenbus_services.intake.input_policies import _by_text, texts_in  # pyright: ignore[reportPrivateUsage]

OPAQUE = {
    "signature": "c2lnbmVk",
    "extra_content": '{"google":{"note":"more"}}',
    "reasoning_details": '[{"text":"a detail"}]',
    "citations": '[{"title":"a page"}]',
}
BODY: dict[str, Any] = {
    "provider": "p",
    "model": "m",
    "system": [{"type": "text", "text": "a system"}],
    "tools": [
        {
            "name": "t",
            "description": "a tool",
            "parameters": {"type": "object", "title": "a schema"},
            "extra": {"anthropic": {"note": "a field of a tool"}},
        },
        {"name": "u", "format": {"type": "grammar", "syntax": "regex", "definition": "a grammar"}},
    ],
    "output_schema": {"schema": {"type": "object", "title": "an output"}},
    "extra": {"note": "an extra"},
    "fallback": [{"provider": "p", "model": "n", "extra": {"note": "a fallback"}}],
    "prefill": {"first_user_message": "a first"},
    "messages": [
        {"role": "user", "content": "a text", "participant": "a name"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "text": "a thought", "signature": "s"},
                {"type": "text", "text": "an answer", "opaque": {"api": "x", "fields": '{"note":"a field"}'}},
                {"type": "tool_call", "tool_id": "c", "tool_name": "t", "arguments": '{"a":"an argument"}'},
                {"type": "tool_call", "tool_id": "d", "tool_name": "t", "arguments": "", "opaque": OPAQUE},
            ],
        },
        {"role": "tool", "content": [{"type": "tool_result", "tool_id": "c", "content": "a result"}]},
        {
            "role": "user",
            "content": [
                {"type": "extra", "name": "p.thing", "json": '{"a":"an item"}'},
                {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}},
                {
                    "type": "document",
                    "title": "a title",
                    "context": "a context",
                    "source": {"type": "base64", "media_type": "text/plain", "data": b64encode(b"a document").decode()},
                },
                {"type": "text", "text": ""},
            ],
        },
    ],
}
TEXTS = [
    ("system", "a system"),
    ("system", "a first"),
    ("tool", "a tool"),
    ("tool", '{"type":"object","title":"a schema"}'),
    ("extra", '{"anthropic":{"note":"a field of a tool"}}'),
    ("tool", '{"type":"grammar","syntax":"regex","definition":"a grammar"}'),
    ("format", '{"schema":{"type":"object","title":"an output"}}'),
    ("extra", '{"note":"an extra"}'),
    ("extra", '{"note":"a fallback"}'),
    ("user", "a text"),
    ("name", "a name"),
    ("assistant", "a thought"),
    ("assistant", "an answer"),
    ("extra", '{"note":"a field"}'),
    ("assistant", '{"a":"an argument"}'),
    ("extra", '{"google":{"note":"more"}}'),
    ("extra", '[{"text":"a detail"}]'),
    ("extra", '[{"title":"a page"}]'),
    ("tool", "a result"),
    ("user", '{"a":"an item"}'),
    ("user", "a title"),
    ("user", "a context"),
    ("user", "a document"),
]


def test_every_text_of_a_request_is_judged_and_replaced_at_its_place() -> None:
    body: Any = msgspec.to_builtins(msgspec.convert(BODY, Generate))
    texts = list(texts_in(body))
    assert [(text.role, text.text) for text in texts] == TEXTS
    for text in texts:
        text.put(text.text.replace("a ", "@ ").replace("an ", "@n "))
    request = msgspec.convert(body, Generate)
    again: Any = msgspec.to_builtins(request)
    # What the provider wants back with a text goes with that text.
    assert [(text.role, text.text) for text in texts_in(again)] == [
        (role, text.replace("a ", "@ ").replace("an ", "@n ")) for role, text in TEXTS if text != '{"note":"a field"}'
    ]
    thought: Any = request.messages[1].content[0]
    assert thought.signature is None, "a provider refuses a signature of another text"
    document: Any = request.messages[3].content[2]
    assert b64decode(document.source.data) == b"@ document"


def test_data_that_a_provider_gets_back_stay_json_and_have_no_more_than_was_released() -> None:
    called = {"type": "tool_call", "tool_id": "c", "tool_name": "t", "arguments": "{}", "opaque": dict(OPAQUE)}
    texts = list(texts_in({"role": "assistant", "content": [called]}))
    more = next(text for text in texts if "google" in text.text)
    with pytest.raises(msgspec.DecodeError):
        more.put("[redacted]")
    more.put("{}")
    assert called["opaque"] == {**OPAQUE, "extra_content": "{}"}


def test_the_texts_of_a_message_of_a_session_are_its_own_and_those_of_its_request() -> None:
    message = SessionMessage(content="hello", request={"system": "be kind", "metadata": {"a": "b"}, "content": 5})
    assert [text.text for text in texts_in(msgspec.to_builtins(message))] == ["be kind", "hello"]


def test_the_texts_of_a_decision_are_what_it_brings() -> None:
    answer = Answer(run="r", wait="1.1", decision_id="d", content={"name": "ann"})
    body: Any = msgspec.to_builtins(answer)
    (text,) = texts_in(body)
    text.put('{"name":"ben"}')
    assert msgspec.convert(body, Answer).content == {"name": "ben"}
    with pytest.raises(msgspec.DecodeError):
        text.put('["ben"]')
    denied = Approval(run="r", wait="1.1", decision_id="d", decision="deny", reason="no")
    assert [text.text for text in texts_in(msgspec.to_builtins(denied))] == ["no"]


def test_what_no_json_can_be_made_of_stands_nowhere() -> None:
    (text,) = texts_in({"extra": {"a": "b"}})
    with pytest.raises(msgspec.DecodeError):
        text.put("no json")


@pytest.mark.parametrize(
    ("blocks", "count", "released"),
    [
        ([("user 0", "a"), ("user 1", "b")], 2, ["a", "b"]),
        ([("", "notice")], 1, ["notice"]),
        ([("user 0", "a"), ("", "notice"), ("user 2", "c")], 3, ["a", "notice", "c"]),
        ([("user 0", "a"), ("", " and more"), ("user 1", "b")], 2, ["a and more", "b"]),
        ([("", "x"), ("", "y")], 2, ["x", "y"]),
        ([("", "x"), ("user 0", "a")], 1, ["xa"]),
        ([("user 1", "b")], 2, None),
        ([], 1, None),
    ],
)
def test_a_block_that_a_policy_made_stands_for_the_text_that_it_withheld(
    blocks: list[tuple[str, str]], count: int, released: list[str] | None
) -> None:
    assert _by_text(blocks, count) == released

"""Fields of a request that this version does not know: refused by clients, noted by intake."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tokenbus.core.request.parse import MAX_NOTES, decode_request, decode_with_notes, notes_of, request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate

PLAIN: dict[str, Any] = {
    "type": "generate",
    "provider": "p",
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
}


def part(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


MISSPELT: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "max_token": ({"max_token": 5}, "max_token", "max_tokens"),
    "camel case": ({"maxTokens": 5}, "maxTokens", "max_tokens"),
    "message": ({"messages": [{"role": "user", "contents": "Hi"}]}, "messages[0].contents", "content"),
    "part": (part(type="text", txt="Hi"), "messages[0].content[0].txt", "text"),
    "source": (
        part(type="image", source={"type": "url", "url": "https://a.example", "urls": ""}),
        "messages[0].content[0].source.urls",
        "url",
    ),
    "within a tool's result": (
        {
            "messages": [
                {
                    "role": "tool",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_id": "t",
                            "content": [{"type": "text", "text": "", "cach": 1}],
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0].cach",
        "cache",
    ),
    "tool": ({"tools": [{"name": "t", "parametres": {}}]}, "tools[0].parametres", "parameters"),
    "tool_choice": ({"tool_choice": {"name": "t", "names": []}}, "tool_choice.names", "name"),
    "thinking": ({"thinking": {"budget": 5}}, "thinking.budget", "budget_tokens"),
    "system": ({"system": [{"type": "text", "text": "a", "cached": True}]}, "system[0].cached", "cache"),
    "output_schema": ({"output_schema": {"schema": {}, "stric": True}}, "output_schema.stric", "strict"),
    "prefill": ({"prefill": {"delimeter": "x"}}, "prefill.delimeter", "delimiter"),
    "images": ({"images": {"sizes": "2K"}}, "images.sizes", "size"),
    "fallback": ({"fallback": [{"provider": "q", "model": "n", "extras": {}}]}, "fallback[0].extras", "extra"),
    "nothing like it": ({"xyzzy": 1}, "xyzzy", None),
}
WRONG_WORDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"type": "generat"}, "type", "generate"),
    "mode": ({"mode": "chats"}, "mode", "chat"),
    "on_failure": ({"on_failure": "restarts"}, "on_failure", "restart"),
    "role": ({"messages": [{"role": "asistant", "content": "Hi"}]}, "messages[0].role", "assistant"),
    "part": (part(type="txt", text="Hi"), "messages[0].content[0].type", "text"),
    "source": (part(type="image", source={"type": "base46"}), "messages[0].content[0].source.type", "base64"),
    "tool_choice": ({"tool_choice": "atuo"}, "tool_choice", "auto"),
    "effort": ({"thinking": {"effort": "hihg"}}, "thinking.effort", "high"),
}


def entry(**changes: Any) -> dict[bytes, bytes]:
    return {b"__data__": json.dumps({**PLAIN, **changes}).encode()}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_field_is_refused_by_its_place_with_the_nearest_there_is(name: str) -> None:
    changes, where, meant = MISSPELT[name]
    with pytest.raises(RequestInvalid) as caught:
        request_from({**PLAIN, **changes})
    assert caught.value.where == where
    assert caught.value.problem == "there is no such field" + (f"; did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize("name", [n for n in MISSPELT if n not in ("message", "part", "tool_choice", "prefill")])
def test_an_accepted_request_gets_a_note_for_an_unknown_field_which_has_no_effect(name: str) -> None:
    changes, where, _ = MISSPELT[name]
    _, notes = decode_with_notes(entry(**changes))
    [note] = notes
    assert note.startswith(f"{where} has no effect: there is no such field")


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_a_misspelt_word_is_refused_on_both_sides_with_a_suggestion(name: str) -> None:
    changes, where, meant = WRONG_WORDS[name]
    for take in (lambda: request_from({**PLAIN, **changes}), lambda: decode_request(entry(**changes))):
        with pytest.raises(RequestInvalid) as caught:
            take()
        assert caught.value.where == where
        assert f"did you mean {meant!r}?" in caught.value.problem


def test_what_is_the_callers_own_may_have_any_name() -> None:
    own = {"max_token": {"max_token": 1}}
    tool = {"name": "t", "parameters": {"type": "object", "max_token": 1}}
    schema = {"schema": {"type": "object", "propertys": {}}}
    request = {**PLAIN, "metadata": own, "extra": own, "tools": [tool], "output_schema": schema}
    assert isinstance(request_from(request), Generate)
    assert notes_of(request) == []


def test_notes_are_bounded_for_any_number_of_unknown_fields() -> None:
    many = {f"{'x' * 5000}{n}": n for n in range(1000)}
    notes = notes_of({**PLAIN, **many})
    assert len(notes) == MAX_NOTES
    assert all(len(note) < 200 for note in notes)
    with pytest.raises(RequestInvalid):
        notes_of({**many, **PLAIN, "mode": "chats"})


def test_a_request_of_this_version_has_nothing_unknown_in_it() -> None:
    request = request_from(PLAIN)
    assert notes_of(msgspec.to_builtins(request)) == []


@pytest.mark.parametrize("name", ["policy", "polices", "Policies", "visble"])
def test_a_misspelt_field_that_keeps_output_back_is_refused_and_never_ignored(name: str) -> None:
    with pytest.raises(RequestInvalid, match=f"{name}: there is no such field; did you mean"):
        notes_of({**PLAIN, name: ["redact"]})

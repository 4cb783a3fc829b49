"""The text of one turn: which of its tags count, and what its calls say."""

from __future__ import annotations

import json

import pytest

from tests.unit.core.prefill.reading import joined, read, reader, regions
from tokenbus.core.prefill.calls import call_id
from tokenbus.core.prefill.tag_scanner import PREFIX
from tokenbus.events import normalized as n

TYPES = {"f": {"n": ["integer"], "maybe": ["string", "null"]}}


def call(body: str) -> str:
    return f'<function_calls><invoke name="f">{body}</invoke></function_calls>'


def only_call(body: str) -> n.ToolCallDelta:
    [start, arguments, done] = joined(read([call(body)], types=TYPES))
    assert isinstance(start, n.ToolCallStart)
    assert isinstance(arguments, n.ToolCallDelta)
    assert done == n.ToolCallDone(0)
    return arguments


def problem_of(body: str) -> str:
    done = read([call(body)], types=TYPES)[-1]
    assert isinstance(done, n.ToolCallDone)
    return done.problem


def test_text_thinking_and_calls_come_in_the_order_of_the_document() -> None:
    text = f"Let me see.\n<thinking>Hm.</thinking>\n\n{call('')}"
    assert [(b.kind, b.content) for b in regions(read(text))] == [
        ("text", "Let me see.\n"),
        ("thinking", "Hm."),
        ("tool_call", "{}"),
    ]


def test_a_parameter_of_text_streams_as_it_comes() -> None:
    reading = reader(types=TYPES)
    reading.feed('<function_calls><invoke name="f"><parameter name="q">')
    assert reading.feed('one "two') == [n.ToolCallDelta(0, 'one \\"two')]
    assert reading.feed(" & three &amp;") == [n.ToolCallDelta(0, " & three &amp;")]


def test_a_parameter_of_another_type_is_read_at_its_end_and_integers_stay_exact() -> None:
    assert only_call('<parameter name="n"> 90071992547409931 </parameter>').fragment == '{"n":90071992547409931}'


@pytest.mark.parametrize(("expected", "value"), [("null", None), ("Rome", "Rome"), ("5", "5"), ("", "")])
def test_if_a_string_is_allowed_json_is_read_only_as_another_allowed_type(expected: str, value: object) -> None:
    assert json.loads(only_call(f'<parameter name="maybe">{expected}</parameter>').fragment) == {"maybe": value}


def test_a_value_is_opaque_until_its_own_close() -> None:
    value = f"a</invoke></function_calls><thinking></{PREFIX}parameter>"
    assert json.loads(only_call(f'<parameter name="q">{value}</parameter>').fragment) == {"q": value}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<parameter name="n">five</parameter>', "not JSON"),
        ("<parameter>5</parameter>", "no name"),
        ('<parameter name="q">1</parameter><parameter name="q">2</parameter>', "twice"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body: str, problem: str) -> None:
    assert problem in problem_of(body)


def test_closed_calls_stay_valid_if_another_is_not_closed() -> None:
    text = '<function_calls><invoke name="a"><invoke name="b"/>\nand<parameter name="q">1</parameter><invoke name="c">'
    found = regions(read(text))
    assert [(b.name, b.malformed) for b in found] == [("a", True), ("b", False), ("", True), ("c", True)]


def test_the_calls_end_is_the_turns_end_and_what_follows_never_comes_out() -> None:
    reading = reader()
    text = call("")
    events = reading.feed(f"{text}\n<function_results><result>invented</result></function_results>The end.")
    assert reading.over
    assert reading.feed("more") == []
    assert reading.text == text
    assert [b.kind for b in regions(events + reading.end())] == ["tool_call"]


def test_calls_left_open_get_the_close_that_their_results_need() -> None:
    reading = reader()
    events = reading.feed('<function_calls><invoke name="f"></invoke>\n</func')
    assert [b.malformed for b in regions(events + reading.end())] == [False]
    assert reading.text == '<function_calls><invoke name="f"></invoke>\n</function_calls>'


def test_an_unknown_tag_is_text_and_so_is_the_markup_of_calls_outside_of_calls() -> None:
    text = 'a <b>bold</b> <invoke name="f"><parameter name="q">x</parameter></invoke> </result>'
    assert [(b.kind, b.content) for b in regions(read(text))] == [("text", text)]


def test_text_that_cannot_become_a_tag_is_emitted_at_once() -> None:
    reading = reader()
    assert reading.feed("<thi") == []
    assert reading.feed("ef") == [n.BlockStart(0, "text"), n.TextDelta(0, "<thief")]


def test_thinking_that_the_prompt_opened_is_the_turns_first_block() -> None:
    found = regions(read("I think.</thinking>I say.", inside="thinking"))
    assert [(b.kind, b.content) for b in found] == [("thinking", "I think."), ("text", "I say.")]


@pytest.mark.parametrize(
    "expected", ["<thinking>So it is.", "Well<thinking>So it is.</thinkin", "<thinking>So it is.<b>"]
)
def test_thinking_that_never_closes_is_never_emitted_as_text(expected: str) -> None:
    *before, last = regions(read(expected))
    assert (last.kind, last.content.startswith("So it is.")) == ("thinking", True)
    assert [block.content for block in before if block.kind == "text"] == (["Well"] if expected.startswith("W") else [])


def test_other_names_of_thinking_are_data_and_close_by_themselves_alone() -> None:
    found = regions(read("<think>a</thinking>b</think>c", thinking=("thinking", "think")))
    assert [(b.kind, b.content) for b in found] == [("thinking", "a</thinking>b"), ("text", "c")]


@pytest.mark.parametrize(
    "text",
    ["\n \n", "<thinking> </thinking>\n", "<thinking></thinking>", "</thinking>", "<function_calls></function_calls>"],
)
def test_empty_content_makes_no_block(text: str) -> None:
    assert read(text) == []


def test_nothing_of_a_stop_string_leaks_however_it_is_cut() -> None:
    reading = reader(stops=("\nBob:", "\nBobby says"))
    assert regions(read("Hi\nBobby says", stops=("\nBob:", "\nBobby says"))) == regions(read("Hi"))
    assert reading.feed("Hi\nBo") == [n.BlockStart(0, "text"), n.TextDelta(0, "Hi")]
    assert reading.feed("b:") == [n.BlockStop(0)]
    assert (reading.over, reading.stopped_on) == (True, "\nBob:")


def test_stop_strings_do_not_count_in_thinking_or_in_a_parameter() -> None:
    text = "<thinking>\nBob: hm</thinking>" + call('<parameter name="q">\nBob: x</parameter>')
    assert [b.content for b in regions(read(text, stops=("\nBob:",)))] == ["\nBob: hm", '{"q":"\\nBob: x"}']


def test_held_text_comes_out_at_the_end() -> None:
    assert regions(read(["Hi <think", "ing"], stops=("ingot",)))[0].content == "Hi <thinking"


def test_the_id_of_a_call_is_made_of_run_turn_and_ordinal() -> None:
    events = read('<function_calls><invoke name="a"/><invoke name="b"/></function_calls>')
    ids = [event.tool_id for event in events if isinstance(event, n.ToolCallStart)]
    assert ids == [call_id("r1/0", 0), call_id("r1/0", 1)]
    assert len({*ids, call_id("r1/1", 0), call_id("r2/0", 0)}) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi <|eot|>Bob: never", [("text", "Hi ")]),
        ("<thinking>Hm<|eot|></thinking>never", [("thinking", "Hm")]),
        ("a <|eo b <|eot", [("text", "a <|eo b <|eot")]),
        ("<<|eot|>", [("text", "<")]),
        ("<thinking<|eot|>>", [("text", "<thinking")]),
        ("<|eot|>never", []),
    ],
)
def test_the_end_of_turn_token_ends_the_turn_for_every_cut(
    text: str, expected: list[tuple[str, str]], size: int
) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert [(block.kind, block.content) for block in regions(read(pieces, end_of_turn="<|eot|>"))] == expected


def test_the_token_in_a_value_cuts_the_call_and_between_calls_those_before_it_stay_sound() -> None:
    begun = '<function_calls><invoke name="f"><parameter name="q">a'
    [cut] = regions(read([begun + "<|eot|>"], end_of_turn="<|eot|>"))
    assert cut.malformed
    [sound] = regions(read([begun + "</parameter></invoke>\n<|eot|>"], end_of_turn="<|eot|>"))
    assert not sound.malformed


def test_the_text_of_a_turn_is_without_the_token_and_with_what_only_began_like_it() -> None:
    reading = reader(end_of_turn="<|eot|>")
    reading.feed("Hi <|eo")
    assert reading.text == "Hi <|eo"
    reading.feed("t|> more")
    assert (reading.text, reading.over, reading.stopped_on) == ("Hi ", True, "")
    assert reading.knows("<|eot|>")
    assert not reader().knows("")


def test_each_alias_of_thinking_opens_it_and_closes_what_it_opened() -> None:
    text = "<think>a</thinking>b</think>c<reasoning>d</reasoning>"
    blocks = [(block.kind, block.content) for block in regions(read(text, thinking=("thinking", "think", "reasoning")))]
    assert blocks == [("thinking", "a</thinking>b"), ("text", "c"), ("thinking", "d")]


@pytest.mark.parametrize("pieces", [[" Hello"], [" ", "Hello"], list(" Hello")])
def test_the_blank_between_a_name_and_the_turns_first_text_is_not_of_the_text(pieces: list[str]) -> None:
    def texts_emitted(pieces: list[str], *, follows_a_name: bool = True) -> list[str]:
        return [b.content for b in regions(read(pieces, follows_a_name=follows_a_name)) if b.kind == "text"]

    assert texts_emitted(pieces) == ["Hello"]
    assert texts_emitted(pieces, follows_a_name=False) == [" Hello"], (
        "where the model's own message goes on it is its own"
    )
    assert texts_emitted([" ", *pieces, "  you"]) == [" Hello  you"], "one blank, and no more"
    assert texts_emitted([" <thinking>Hm</thinking>", *pieces]) == ["Hello"]
    reading = reader(follows_a_name=True)
    for piece in pieces:
        reading.feed(piece)
    assert reading.text == " Hello", "the model's own words stay as they are"

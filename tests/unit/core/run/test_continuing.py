"""`on_failure` continue: the listener gets one text after any failure in the middle of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.run.script import Story, call, of_type, text
from tokenbus.core.run.attempts import WORKER_LOST
from tokenbus.core.run.continuation import Seam
from tokenbus.core.run.effects import NextTurn
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import BusEvent, RunLimits, TextReading
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Retrying,
    RunFailedEvent,
    UsageReported,
)
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate, Message, OutputSchema, TextPart, Thinking, ThinkingPart
from tokenbus.events.usage import Usage
from tokenbus.providers.registry import continues

LOST = n.Cut("the fetcher was lost", ErrorInfo(code=WORKER_LOST, kind="internal", message="lost", retryable=True))
BUSY = n.Failed(ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True))
CUT = n.Cut("the stream ended early")


def story(**changes: object) -> Story:
    return Story(on_failure="continue", continues=True, **changes)


def begun(*pieces: str, block: int = 0) -> list[BusEvent]:
    """A text that its attempt does not end."""
    return [n.BlockStart(block, "text"), *(n.TextDelta(block, piece) for piece in pieces)]


def visible_text(events: list[PublicEvent]) -> str:
    return "".join(e.text for e in events if isinstance(e, Chunk) and e.visible)


def next_attempt(scenario: Story) -> NextTurn:
    effect = scenario.effects[-1]
    assert isinstance(effect, NextTurn)
    return effect


@pytest.mark.parametrize("end", [LOST, BUSY, CUT], ids=["worker", "provider", "stream"])
def test_the_next_attempt_continues_in_the_open_block(end: BusEvent) -> None:
    scenario = story()
    scenario.provider(n.Start("m"), *begun("Hello", " wor"), end)
    [retrying] = of_type(scenario.events, Retrying)
    assert (retrying.attempt, retrying.next_attempt, retrying.drop_from, retrying.continues) == (1, 2, 1, True)
    effect = next_attempt(scenario)
    assert (effect.work.turn, effect.work.attempt, effect.history) == (0, 2, None)
    assert effect.so_far == Message(role="assistant", content=[TextPart(text="Hello wor")])
    scenario.provider(n.Start("m"), *text(0, "ld", "."), n.Done("stop"))
    assert visible_text(scenario.events) == "Hello world."
    assert [e.block for e in of_type(scenario.events, BlockStarted)] == [0]
    [whole] = of_type(scenario.events, BlockComplete)
    assert (whole.block, whole.content, whole.cut) == (0, "Hello world.", None)
    assert isinstance(scenario.events[-1], Completed)


@given(st.text(alphabet=" \n\tab", max_size=6), st.text(alphabet=" \n\tab", min_size=1, max_size=6), st.data())
def test_whitespace_at_the_seam_is_emitted_once_for_any_cut(before: str, rest: str, data: st.DataObject) -> None:
    blank = before[len(before.rstrip()) :]
    whole = Seam(blank).join(rest)
    cut = data.draw(st.integers(1, len(rest)))
    parts = [part for part in (rest[:cut], rest[cut:]) if part]
    seam = Seam(blank)
    joined = "".join(seam.join(part) if not seam.closed else part for part in parts)
    assert joined == whole
    assert rest.endswith(whole)
    assert not rest[: len(rest) - len(whole)].strip(), "nothing but blank space is swallowed"


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ("one two ", " three", "one two three"),
        ("one two ", "three", "one two three"),
        ("one two", " three", "one two three"),
        ("one.\n", "\n\ntwo", "one.\n\ntwo"),
        ("one.\n\n", "\ntwo", "one.\n\ntwo"),
        ("one. \n", "\ntwo", "one. \ntwo"),
    ],
)
def test_a_blank_at_the_seam_is_neither_doubled_nor_lost(first: str, second: str, whole: str) -> None:
    scenario = story()
    scenario.provider(*begun(first), LOST)
    so_far = next_attempt(scenario).so_far
    assert so_far
    assert so_far.content == [TextPart(text=first.rstrip())], "no provider is sent blank space at the end"
    scenario.provider(*text(0, *second), n.Done("stop"))
    assert visible_text(scenario.events) == whole
    assert of_type(scenario.events, BlockComplete)[-1].content == whole


def test_it_may_break_again_and_again() -> None:
    scenario = story()
    scenario.provider(*begun("a"), LOST)
    scenario.provider(*begun("b"), LOST)
    scenario.provider(n.Start("m"), LOST)
    assert next_attempt(scenario).so_far == Message(role="assistant", content=[TextPart(text="ab")])
    scenario.provider(*text(0, "c"), n.Done("stop"))
    assert visible_text(scenario.events) == "abc"
    assert [(e.block, e.content) for e in of_type(scenario.events, BlockComplete)] == [(0, "abc")]


def test_an_empty_continuation_completes_the_text() -> None:
    scenario = story()
    scenario.provider(*begun("All of it."), CUT)
    scenario.provider(n.Start("m"), n.Done("stop"))
    assert [(e.content, e.cut) for e in of_type(scenario.events, BlockComplete)] == [("All of it.", None)]
    assert isinstance(scenario.events[-1], Completed)


def test_complete_blocks_before_the_text_stay_and_what_began_after_it_is_void() -> None:
    scenario = story()
    scenario.provider(
        n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.Opaque(0, "signature", "S"), n.BlockStop(0)
    )
    scenario.provider(*text(1, "Let me look."), n.ToolCallStart(2, "a", "f"), n.ToolCallDelta(2, '{"x'), LOST)
    [cut] = [e for e in of_type(scenario.events, BlockComplete) if e.cut]
    [retrying] = of_type(scenario.events, Retrying)
    assert (cut.block, retrying.drop_from) == (2, 2)
    assert next_attempt(scenario).so_far == Message(
        role="assistant",
        content=[
            ThinkingPart(text="hm", signature="S"),
            TextPart(text="Let me look."),
        ],
    )
    scenario.provider(*call(0, "b", "f", "{}"), n.Done("tool_use"))
    assert [e.block for e in of_type(scenario.events, BlockStarted)] == [0, 1, 2, 3]


def test_the_whole_answer_is_sent_back_with_the_next_turn() -> None:
    scenario = story()
    scenario.provider(*begun("Let me"), LOST)
    scenario.provider(*text(0, " look."), *call(1, "a", "weather", "{}"), n.Done("tool_use"))
    [message] = scenario.run.state.history
    assert [getattr(part, "text", "call") for part in message.content] == ["Let me look.", "call"]


def test_a_call_ends_the_text_that_another_attempt_left_open() -> None:
    scenario = story()
    scenario.provider(*begun("Let me look."), LOST)
    events = scenario.provider(n.ToolCallStart(0, "a", "f"))
    assert [type(e) for e in events] == [BlockComplete, BlockStarted, Chunk, Chunk]


def test_thinking_before_the_continuation_leaves_the_text_open() -> None:
    scenario = story()
    scenario.provider(*begun("Hel"), LOST)
    scenario.provider(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "again"), n.BlockStop(0), *text(1, "lo"))
    scenario.provider(n.Done("stop"))
    assert [(e.block, e.content) for e in of_type(scenario.events, BlockComplete)] == [(1, "again"), (0, "Hello")]


def test_a_text_after_a_call_cannot_be_continued() -> None:
    scenario = story()
    scenario.provider(*call(0, "a", "f", "{}"), *begun("And", block=1), LOST)
    end = scenario.events[-1]
    assert isinstance(end, Incomplete)
    assert end.provider_extra
    assert "cannot continue the text" in str(end.provider_extra[-1]["note"])


def test_a_run_ends_as_by_default_if_its_provider_or_model_cannot_continue() -> None:
    scenario = Story(on_failure="continue")
    scenario.provider(*begun("Hel"), LOST)
    assert isinstance(scenario.events[-1], Incomplete)
    assert scenario.events[-1].provider_extra


def test_before_any_visible_text_the_turn_begins_again() -> None:
    scenario = story()
    scenario.provider(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), BUSY)
    [retrying] = of_type(scenario.events, Retrying)
    assert (retrying.drop_from, retrying.continues) == (0, None)
    assert next_attempt(scenario).so_far is None


def test_tries_are_bounded_as_for_any_retry() -> None:
    scenario = story(rules=RunLimits(max_attempts=2))
    scenario.provider(*begun("a"), BUSY)
    scenario.provider(*begun("b"), BUSY)
    end = scenario.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.provider_extra is None
    assert visible_text(scenario.events) == "ab"


def test_the_usage_of_all_attempts_adds_up() -> None:
    scenario = story()
    scenario.provider(*begun("a"), n.UsageSeen(Usage(input=5, output=1)), LOST)
    scenario.provider(*text(0, "b"), n.Done("stop", usage=Usage(input=6, output=2)))
    assert [(e.attempt, e.usage.input) for e in of_type(scenario.events, UsageReported)] == [(1, 5), (2, 6)]
    end = scenario.events[-1]
    assert isinstance(end, Completed)
    assert end.usage == Usage(input=11, output=3)


def test_an_attempt_without_an_answer_is_not_reported_with_that_of_the_one_before_it() -> None:
    scenario = story(rules=RunLimits(max_attempts=2))
    scenario.provider(n.Start("m", "resp-1", request_id="req-1"), *begun("a"), BUSY)
    scenario.provider(BUSY)
    first, second = scenario.run.reports
    assert (first.attempt, first.response_id, first.request_id) == (1, "resp-1", "req-1")
    assert (second.attempt, second.answered_model, second.response_id, second.request_id) == (2, "", "", "")
    end = scenario.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert (end.response_id, end.error.request_id) == ("resp-1", None)


def test_whitespace_alone_cannot_be_continued() -> None:
    scenario = story()
    scenario.provider(*begun("\n"), LOST)
    assert next_attempt(scenario).so_far is None
    scenario.provider(*text(0, "\nHello"), n.Done("stop"))
    assert visible_text(scenario.events) == "\nHello"


def test_a_new_attempt_continues_from_a_message_that_begins_again() -> None:
    scenario = story()
    scenario.provider(n.Start("m"), *begun("one"), n.Start("m", "again", 1), *begun("one", block=1))
    assert next_attempt(scenario).work.attempt == 2
    assert visible_text(scenario.events) == "one", "what the old attempt still says is dropped"


def test_prefill_continues_in_the_middle_of_a_tag_of_thinking_and_of_a_call() -> None:
    scenario = story(reading=TextReading())
    pieces = ["Well. <thin", "king>so", '</thinking><function_calls><invoke name="f"><parameter name="q">a', "b"]
    for piece in pieces[:-1]:
        scenario.provider(*begun(piece), LOST)
    so_far = next_attempt(scenario).so_far
    assert so_far == Message(role="assistant", content="".join(pieces[:-1]))
    scenario.provider(*begun("b</parameter></invoke></function_calls>"))
    blocks = [(e.kind, e.content, e.arguments, e.cut) for e in of_type(scenario.events, BlockComplete)]
    assert blocks == [
        ("text", "Well. ", None, None),
        ("thinking", "so", None, None),
        ("tool_call", None, '{"q":"ab"}', None),
    ]
    assert [e.drop_from for e in of_type(scenario.events, Retrying)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("api", "model", "changes", "can"),
    [
        ("anthropic", "claude-sonnet-4-5-20250929", {}, True),
        ("anthropic", "claude-opus-4-6", {}, False),
        ("anthropic", "claude-sonnet-5", {}, False),
        ("anthropic", "claude-sonnet-4-5", {"thinking": Thinking()}, False),
        ("anthropic", "claude-sonnet-4-5", {"thinking": Thinking(enabled=False)}, True),
        ("anthropic", "claude-sonnet-4-5", {"output_schema": OutputSchema(schema={})}, False),
        ("anthropic", "claude-sonnet-4-5", {"tool_choice": "any"}, False),
        ("anthropic", "claude-opus-4-6", {"mode": "prefill", "participant": "C"}, True),
        ("gemini", "gemini-2.5-flash", {}, True),
        ("gemini", "models/gemini-2.5-flash", {}, True),
        ("gemini", "gemma-3", {}, False),
        ("openai-responses", "gpt-5", {}, False),
        ("openai-chat", "gpt-5", {}, False),
    ],
)
def test_the_ability_to_continue_is_data(api: ApiName, model: str, changes: dict[str, object], can: bool) -> None:
    fields: dict[str, object] = {"provider": "p", "model": model, "messages": [Message(role="user", content="hi")]}
    assert continues(Generate(**{**fields, **changes}), api, Quirks()) is can  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("quirks", "can"),
    [
        (Quirks(continues="message"), True),
        (Quirks(continues="completions"), False),
        (Quirks(continues="message", inline_thinking=("think",), inline_thinking_opened=True), False),
    ],
)
def test_a_vendors_quirk_decides_whether_it_continues_a_text(quirks: Quirks, can: bool) -> None:
    request = Generate(provider="p", model="m", messages=[Message(role="user", content="hi")])
    assert continues(request, "openai-chat", quirks) is can


fragments = st.sampled_from(
    [
        *("a", " ", "\n", "b.", "<thinking>", "</thinking>", "<", "</", "<b>", "<function_calls>"),
        *('<invoke name="f">', '<parameter name="q">', "</parameter>", "</invoke>", "</function_calls>"),
    ]
)
documents = st.lists(fragments, min_size=1, max_size=12).map("".join)


def play(full_text: str, breaks: list[int], reading: TextReading | None) -> Story:
    """The events of a model with this text, whose attempts break after these numbers of characters."""
    scenario = story(reading=reading, rules=RunLimits(max_losses=99))
    for size in breaks:
        if scenario.run.over or scenario.run.state.phase != "streaming":
            break
        rest = full_text[len(so_far(scenario)) :]
        scenario.provider(n.Start("m"), *begun(*rest[:size]), LOST)
    if not scenario.run.over and scenario.run.state.phase == "streaming":
        rest = full_text[len(so_far(scenario)) :]
        scenario.provider(n.Start("m"), *text(0, *rest), n.Done("stop"))
    return scenario


def so_far(scenario: Story) -> str:
    """What the request of the present attempt has of the answer."""
    effect = scenario.effects[-1] if scenario.effects else None
    if not isinstance(effect, NextTurn) or effect.so_far is None:
        return ""
    content = effect.so_far.content
    return content if isinstance(content, str) else "".join(p.text for p in content if isinstance(p, TextPart))


def counted(scenario: Story) -> list[tuple[object, ...]]:
    kept: dict[int, tuple[object, ...]] = {}
    for event in scenario.events:
        match event:
            case Retrying():
                kept = {number: block for number, block in kept.items() if number < event.drop_from}
            case BlockComplete():
                kept[event.block] = (event.kind, event.content, event.arguments, event.cut)
            case _:
                pass
    return [kept[number] for number in sorted(kept)]


@given(documents, st.lists(st.integers(0, 12), max_size=4), st.sampled_from([None, TextReading()]))
def test_an_answer_that_breaks_at_any_point_has_the_blocks_of_an_unbroken_one(
    text: str, breaks: list[int], reading: TextReading | None
) -> None:
    broken, whole = play(text, breaks, reading), play(text, [], reading)
    assert counted(broken) == counted(whole)
    assert visible_text(broken.events) == visible_text(whole.events)

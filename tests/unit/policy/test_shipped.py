"""The shipped policies: tool rules, argument schemas, replacement, secrets, and the judge; and how they are loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.core.run.script import item
from tests.unit.policy.streams import actions, call, calls, chunk, chunk_stream, completions, public_stream, text, under
from tests.unit.policy.test_chain import TWO_CALLS, contents
from tests.unit.policy.test_public_events import ANSWER, answer, check_sound
from tokenbus.client.response import Response
from tokenbus.errors import SettingsError
from tokenbus.events import normalized as n
from tokenbus.events.public import Started, encode
from tokenbus.events.requests import ExtraPart, Generate, TextPart, ThinkingPart
from tokenbus.policy.builtin.model_judge import CallJudge
from tokenbus.policy.builtin.rewrite import RedactSecrets, ReplaceText
from tokenbus.policy.builtin.tool_call_gate import ToolRules
from tokenbus.policy.loading import PolicySpec, load
from tokenbus.policy.openai import OpenAIChunks
from tokenbus.policy.policy_runner import BoundPolicy, PolicyStream
from tokenbus.policy.processor import StreamProcessor
from tokenbus.policy.public import PublicEvents
from tokenbus_services.policy_stage.builtin import ArgumentSchemas

KEY = "sk-" + "a1B2" * 10


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"deny": ["f"], "notice": "no {tool}"}, ["Hi", "no f", "g", "there"]),
        ({"allow": ["g*"]}, ["Hi", "g", "there"]),
        ({"allow": ["*"], "deny": ["?"]}, ["Hi", "there"]),
        ({"allow": []}, ["Hi", "there"]),
        ({}, ["Hi", "f", "g", "there"]),
    ],
)
async def test_tools_are_allowed_and_denied_by_name(options: dict[str, Any], left: list[str]):
    assert contents(await under(chunk_stream(ToolRules.from_options(options)), TWO_CALLS)) == left


@pytest.mark.parametrize(
    ("arguments", "passes"), [('{"n": 1}', True), ('{"n": "1"}', False), ("[1]", False), ('{"n": 1', False)]
)
async def test_arguments_must_meet_their_tools_schema(arguments: str, passes: bool):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    policy = ArgumentSchemas.from_options({"schemas": {"f": schema}})
    stream = chunk_stream(policy)
    out = await under(
        stream,
        [
            calls(call(0, arguments, call_id="a", name="f")),
            calls(call(1, "anything", call_id="b", name="unchecked")),
            chunk(finish="tool_calls"),
        ],
    )
    assert contents(out) == (["f"] if passes else []) + ["unchecked"]
    assert actions(stream.decisions()) == ([] if passes else ["block"])


def test_a_wrong_option_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match="Known options: kinds, rules"):
        ReplaceText.from_options({"find": ["a"]})


async def test_words_are_replaced_across_the_borders_of_chunks_and_events_say_the_new_text():
    policy = ReplaceText.from_options({"rules": [{"find": "Hello you", "replace": "Hi"}]})
    stream = public_stream(policy)
    out = await under(stream, ANSWER)
    check_sound(out)
    assert Response.of(out).text == "Hi"
    (decision,) = stream.decisions()
    assert (decision.original, decision.final) == ("Hello you", "Hi")


async def test_a_text_that_is_replaced_by_nothing_is_not_published():
    out = await under(public_stream(ReplaceText.from_options({"rules": [{"find": "Hello you"}]})), ANSWER)
    check_sound(out)
    assert b"Hello" not in b"".join(str(event).encode() for event in out)


async def test_secrets_are_redacted_in_every_field_of_a_block():
    half = len(KEY) // 2
    events = answer(
        *(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, KEY[:half]), n.ThinkingDelta(0, KEY[half:]), n.BlockStop(0)),
        *(n.BlockStart(1, "text"), n.TextDelta(1, f"it is {KEY[:4]}"), n.TextDelta(1, f"{KEY[4:]}"), n.BlockStop(1)),
        *(n.ToolCallStart(2, "i", "f"), n.ToolCallDelta(2, f'{{"key": "{KEY}"}}'), n.ToolCallDone(2)),
    )
    out = await under(public_stream(RedactSecrets.from_options({})), events)
    check_sound(out)
    assert not any(KEY in str(event) for event in out)
    assert [b.content or b.arguments for b in completions(out)] == [
        "[redacted]",
        "it is [redacted]",
        '{"key": "[redacted]"}',
    ]


@pytest.mark.parametrize("first", range(len(ANSWER)))
async def test_a_run_that_is_taken_up_in_the_middle_is_rewritten_from_there(first: int):
    policy = ReplaceText.from_options({"rules": [{"find": "you", "replace": "me"}]})
    out = await under(public_stream(policy), ANSWER[first:])
    assert not any("you" in (b.content or "") for b in completions(out))
    check_sound(out)


async def test_text_before_a_drop_is_released_to_its_last_character():
    policy = ReplaceText.from_options({"rules": [{"find": "secret"}]})
    assert "".join(contents(await under(chunk_stream(policy), [text("a secr")]))) == "a secr"


async def test_values_of_variables_are_secrets_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PET", "Rumpelstilz")
    policy = RedactSecrets.from_options({"env": ["PET", "UNSET_VARIABLE"]})
    out = await under(chunk_stream(policy), [text("I am Rumpel"), text("stilz!"), chunk(finish="stop")])
    assert "".join(contents(out)) == "I am [redacted]!"


class Bus:
    """Stands in for a client: answers each question by the tool it is about."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.questions: list[Generate] = []

    async def publish(self, request: Generate) -> Any:
        self.questions.append(request)
        shown = str(request.messages[0].content)
        answer = next(a for tool, a in self.answers.items() if f'"tool":"{tool}"' in shown)

        async def result() -> Any:
            return SimpleNamespace(text=answer)

        return SimpleNamespace(result=result)


async def judged(bus: Bus | None, **handling: Any) -> tuple[PolicyStream[Any], list[str]]:
    options = {"provider": "p", "model": "m", "notice": "no {tool}: {reason}"}
    link = BoundPolicy("judge", CallJudge.from_options(options))
    stream = PolicyStream[Any]([link], OpenAIChunks(), run="r1", client=bus)  # pyright: ignore[reportArgumentType]
    return stream, contents(await under(stream, TWO_CALLS))


async def test_a_models_verdict_decides_on_each_call():
    bus = Bus(f="BLOCK: it deletes", g="allow")
    stream, left = await judged(bus)
    assert sorted(left) == sorted(["Hi", "there", "no f: it deletes", "g"])
    (decision,) = stream.decisions()
    assert (decision.action, decision.reason, decision.original) == ("block", "it deletes", "{}")
    assert [question.metadata for question in bus.questions] == [{"judges": "r1"}] * 2
    assert not any(question.visible for question in bus.questions)


async def test_the_same_call_is_the_same_question():
    bus = Bus(f="ALLOW", g="ALLOW")
    await judged(bus)
    await judged(bus)
    ids = [question.id for question in bus.questions]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("bus", [None, Bus(f="Sure, go ahead", g="ALLOW")])
async def test_a_judge_that_gives_no_verdict_blocks(bus: Bus | None):
    stream, left = await judged(bus)
    assert "f" not in left
    assert stream.terminated


@pytest.mark.parametrize("module", ["tokenbus.policy", "tokenbus.policy." + "tool_rules"])
def test_a_shipped_policy_is_loaded_by_its_public_name_and_by_the_file_it_once_lay_in(module: str):
    make = load(PolicySpec(policy=f"{module}:ToolRules", options={"deny": ["x"]}, on_error="pass"))
    first, second = make(), make()
    assert first.policy is not second.policy
    assert (first.name, first.handling.on_error, first.policy.options.deny) == ("ToolRules", "pass", ["x"])


class Constructed(StreamProcessor):
    """A policy whose constructor takes other arguments."""

    def __init__(self, options: Any, strict: bool) -> None:
        super().__init__(options)


class Failing(StreamProcessor):
    """A policy whose constructor fails."""

    def __init__(self, options: Any = None) -> None:
        raise ZeroDivisionError


class OnlyOnce(StreamProcessor):
    """A policy that can be made once, as at the start of a worker, and then no more."""

    made = 0

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        OnlyOnce.made += 1
        if OnlyOnce.made > 1:
            raise OSError("no such file")


@pytest.mark.parametrize("on_error", ["block", "pass"])
async def test_a_policy_that_cannot_be_made_for_one_stream_fails_in_that_stream(on_error: Any):
    OnlyOnce.made = 0
    make = load(PolicySpec(policy=f"{__name__}:OnlyOnce", on_error=on_error))
    stream = PolicyStream([make()], PublicEvents(lambda: 0))
    await stream.feed(Started(run="r", seq=0, turn=0, attempt=1, provider="p", model="m"))
    (decision,) = stream.decisions()
    assert (decision.action, "it could not be made: OSError: no such file" in decision.reason) == ("error", True)
    assert (stream.terminated is not None) == (on_error == "block")


@pytest.mark.parametrize(
    ("path", "options", "problem"),
    [
        ("no.such.module:Policy", {}, "cannot be imported"),
        ("tokenbus.policy:Missing", {}, "cannot be imported"),
        ("tokenbus.policy:NewText", {}, "neither a class of StreamProcessor nor a function"),
        ("tokenbus.policy:ToolCallGate", {}, "only the base class of policies"),
        ("tokenbus.policy:ToolRules", {"dney": []}, "unknown field `dney`"),
        ("tokenbus.policy:ToolRules", {"deny": "x"}, r"\$.deny"),
        ("tokenbus.policy:ReplaceText", {"rules": [{"find": "x", "then": "a+"}]}, r"rules\[0\]"),
        (
            f"{__name__}:Constructed",
            {},
            r"Constructed: constructor: it raised TypeError: .*'strict'.*options=None",
        ),
        (f"{__name__}:Failing", {}, "Failing: constructor: it raised ZeroDivisionError"),
        (
            "tokenbus_services.policy_stage.builtin:ArgumentSchemas",
            {"schemas": {"f": {"type": 1}}},
            "not a JSON schema",
        ),
    ],
)
def test_a_wrong_policy_or_option_is_named(path: str, options: dict[str, Any], problem: str):
    with pytest.raises(SettingsError, match=problem):
        load(PolicySpec(policy=path, options=options), "tokenbus.toml")


def searched(query: str, *, title: str = "t") -> list[n.Normalized]:
    """A search that the provider runs, its result, and a text that cites it."""
    call, found = f'{{"input":{{"q":"{query}"}}}}', f'{{"content":[{{"title":"{title}"}}]}}'
    cited = f'{{"cited_text":"{title}"}}'
    return [
        *item(0, "anthropic.server_tool_use", call, "web_search", "s1"),
        *item(1, "anthropic.web_search_tool_result", found, "web_search", "s1"),
        *(n.BlockStart(2, "text"), n.TextDelta(2, "So."), n.Extra("anthropic.citation", cited, 2)),
        *(n.Opaque(2, "citations", f"[{cited}]"), n.BlockStop(2), n.Extra("x.grounding", cited)),
    ]


@pytest.mark.parametrize("options", [{"deny": ["web_search*"], "notice": "no {tool}"}, {"allow": ["weather"]}])
async def test_a_tool_that_the_provider_runs_is_denied_by_its_name(options: dict[str, Any]):
    stream = public_stream(ToolRules.from_options(options))
    out = await under(stream, answer(*searched("q"), *item(3, "anthropic.compaction", "{}"), finish="stop"))
    check_sound(out)
    response = Response.of(out)
    notice = ["no web_search"] if "notice" in options else []
    assert [block.content for block in response.blocks] == [*notice, "So.", "{}"], "call and result, and one notice"
    assert [(d.action, d.tool_name, d.tool_id) for d in stream.decisions()] == [("block", "web_search", "s1")] * 2
    assert [part for message in response.messages for part in message.content if isinstance(part, ExtraPart)] == [
        ExtraPart(name="anthropic.compaction", json="{}")
    ]


async def test_items_go_back_under_a_policy_that_leaves_them_as_they_are():
    events = answer(*searched("q"), finish="stop")
    out = await under(public_stream(ToolRules.from_options({})), events)
    check_sound(out)
    assert Response.of(out).messages == Response.of(events).messages
    assert [block.item for block in Response.of(out).blocks][:2] == [
        "anthropic.server_tool_use",
        "anthropic.web_search_tool_result",
    ]


async def test_secrets_are_redacted_in_searches_results_and_citations():
    out = await under(public_stream(RedactSecrets()), answer(*searched(KEY, title=KEY), finish="stop"))
    check_sound(out)
    assert KEY.encode() not in b"".join(encode(event) for event in out)
    call, found, text = Response.of(out).blocks
    assert (call.content, found.content) == (
        '{"input":{"q":"[redacted]"}}',
        '{"content":[{"title":"[redacted]"}]}',
    )
    cited = '{"cited_text":"[redacted]"}'
    assert text.provider_extra == [{"name": "anthropic.citation", "json": cited}]
    assert text.opaque
    assert text.opaque["citations"] == f"[{cited}]"
    assert out[-1].provider_extra == [{"name": "x.grounding", "json": cited}]
    [message] = Response.of(out).messages
    assert message.content[0] == ExtraPart(name="anthropic.server_tool_use", json=call.content or "")


async def test_secrets_are_redacted_in_the_prompts_of_an_image():
    first = n.Image(0, "image/png", "aGk=", final=False, prompt=KEY)
    last = n.Image(0, "image/png", "aGk=", final=True, revised_prompt=f"a cat with {KEY}", prompt=KEY)
    events = answer(n.BlockStart(0, "image", KEY), first, last, n.BlockStop(0), finish="stop")
    assert KEY.encode() in b"".join(encode(event) for event in events)
    out = await under(public_stream(RedactSecrets()), events)
    check_sound(out)
    assert KEY.encode() not in b"".join(encode(event) for event in out)
    [block] = Response.of(out).blocks
    assert block.image
    assert (block.image.prompt, block.image.revised_prompt) == ("[redacted]", "a cat with [redacted]")
    assert block.image.base64 == "aGk="


async def test_an_item_that_a_policy_made_invalid_json_is_not_sent_back():
    rules = {"rules": [{"find": '"q"', "replace": '"'}], "kinds": ["server_tool"]}
    out = await under(public_stream(ReplaceText.from_options(rules)), answer(*searched("x"), finish="stop"))
    check_sound(out)
    [message] = Response.of(out).messages
    names = [part.name for part in message.content if isinstance(part, ExtraPart)]
    assert names == ["anthropic.web_search_tool_result"]


def reasoned(details: str) -> list[n.Normalized]:
    """Reasoning whose data for the provider comes after it."""
    return [
        *(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "Hm."), n.BlockStop(0)),
        *(n.BlockStart(1, "text"), n.TextDelta(1, "Yes."), n.BlockStop(1), n.Opaque(0, "reasoning_details", details)),
    ]


async def test_reasoning_goes_back_under_a_policy_unless_its_data_has_a_secret():
    events = answer(*reasoned('[{"text":"Hm.","signature":"s"}]'), finish="stop")
    out = await under(public_stream(RedactSecrets()), events)
    check_sound(out)
    assert Response.of(out).messages == Response.of(events).messages
    events = answer(*reasoned(f'[{{"text":"{KEY}","signature":"s"}}]'), finish="stop")
    out = await under(public_stream(RedactSecrets()), events)
    assert KEY.encode() not in b"".join(encode(event) for event in out)
    [message] = Response.of(out).messages
    assert message.content == [ThinkingPart(text="Hm."), TextPart(text="Yes.")]


async def test_readable_data_in_a_blob_is_withheld_by_a_policy_that_rewrites():
    cited = [n.Opaque(0, "citations", "", "sha256:1"), n.Opaque(0, "encrypted", "", "sha256:2")]
    events = answer(n.BlockStart(0, "text"), n.TextDelta(0, "So."), *cited, n.BlockStop(0), finish="stop")
    [block] = Response.of(await under(public_stream(RedactSecrets()), events)).blocks
    assert block.opaque_blobs == {"encrypted": "sha256:2"}


async def test_a_sound_is_withheld_if_its_transcript_is_redacted():
    def spoken(words: str) -> list[n.Normalized]:
        sound = n.Audio(0, "audio/wav", "", "audio_1", 0, "sha256:7", 2)
        return [n.BlockStart(0, "audio"), n.TranscriptDelta(0, words), sound, n.BlockStop(0)]

    for words, published in ((f"It is {KEY}!", "It is [redacted]!"), ("It is fine.", "It is fine.")):
        out = await under(public_stream(RedactSecrets()), answer(*spoken(words), finish="stop"))
        check_sound(out)
        [block] = Response.of(out).blocks
        assert (block.kind, block.content) == ("audio", published)
        assert (block.audio is not None) == (words == published)

"""How OpenAI-style chunks become blocks: when one begins, when it is complete, and what a policy is called with."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from tests.unit.policy.streams import CallsApart, Notes, call, calls, chunk, chunk_stream, text, under
from tokenbus.errors import Malformed
from tokenbus.policy.stream_state import ContentStreamBlock, ToolCallStreamBlock


async def noted(*chunks: Any) -> Notes:
    notes = Notes()
    await under(chunk_stream(notes), chunks)
    return notes


async def test_a_block_is_complete_when_another_begins_and_the_last_at_the_finish_reason():
    notes = await noted(
        text("Hi"),
        calls(call(0, call_id="a", name="f")),
        calls(call(0, '{"x":')),
        calls(call(0, "1}")),
        calls(call(1, "{}", call_id="b", name="g")),
        chunk(finish="tool_calls"),
    )
    assert [bool(block) for block, _ in notes.calls] == [False, True, False, False, True, True]
    assert notes.done == ["Hi", 'f({"x":1})', "g({})"]
    assert notes.state
    assert [block.is_complete for block in notes.state.blocks] == [True] * 3


async def test_empty_strings_neither_begin_a_block_nor_complete_one():
    notes = await noted(
        chunk({"role": "assistant", "content": ""}),
        calls(call(0, call_id="a", name="f")),
        text(""),
        calls({"index": 1, "id": "", "function": {"name": "", "arguments": ""}}),
        calls(call(0, "{}")),
        chunk(finish="tool_calls"),
    )
    assert notes.done == ["f({})"]


async def test_arguments_stay_the_raw_string():
    notes = await noted(calls(call(0, '{"a": tru', call_id="a", name="f")), chunk(finish="length"))
    assert notes.state
    (block,) = notes.state.blocks
    assert isinstance(block, ToolCallStreamBlock)
    assert (block.id, block.index, block.name, block.arguments) == ("a", 0, "f", '{"a": tru')


async def test_a_chunk_that_completes_two_blocks_calls_the_policy_once_for_each():
    chunks = [
        calls(call(0, "{}", call_id="a", name="f")),
        calls(call(1, "{}", call_id="b", name="g"), finish="tool_calls"),
    ]
    notes = Notes()
    out = await under(chunk_stream(notes), chunks)
    finished = [(block and block.id, finish) for block, finish in notes.calls]
    assert finished == [(None, None), ("a", None), ("b", "tool_calls")]
    assert [c["choices"][0]["finish_reason"] for c in out] == [None, None, "tool_calls"]
    assert [c["choices"][0]["delta"].get("tool_calls") for c in out[:2]] == [
        c["choices"][0]["delta"]["tool_calls"] for c in chunks
    ]


async def test_a_whole_answer_in_one_chunk_comes_in_a_part_for_each_block():
    whole = chunk(
        {
            "role": "assistant",
            "content": "Hi",
            "tool_calls": [call(0, "{}", call_id="a", name="f"), call(1, call_id="b", name="g")],
        },
        finish="tool_calls",
        usage={"total_tokens": 3},
    )
    blocking = CallsApart(["f"])
    out = await under(chunk_stream(blocking), [whole])
    deltas = [c["choices"][0]["delta"] for c in out]
    assert [d.get("content") for d in deltas if d.get("content")] == ["Hi", "[f blocked]"]
    (kept,) = [tool for d in deltas for tool in d.get("tool_calls") or []]
    assert (kept["index"], kept["id"]) == (0, "b")
    assert out[-1]["usage"] == {"total_tokens": 3}
    assert all("usage" not in c for c in out[:-1])
    assert [d["role"] for d in deltas if "role" in d] == ["assistant"]


async def test_a_finish_reason_stands_alone_so_that_what_came_with_it_can_be_changed():
    notes = Notes()
    out = await under(chunk_stream(notes), [text("all", finish="stop")])
    assert [(block is not None, finish) for block, finish in notes.calls] == [(False, None), (True, "stop")]
    assert [c["choices"][0]["delta"].get("content") for c in out] == ["all", None]


async def test_the_stream_continues_after_the_finish_reason_for_usage():
    usage = {"choices": [], "usage": {"total_tokens": 3}}
    notes = Notes()
    out = await under(chunk_stream(notes), [text("Hi"), chunk(finish="stop"), usage])
    assert notes.calls[-1] == (None, "stop")
    assert out[-1] is usage


async def test_several_texts_are_several_blocks():
    notes = await noted(text("a"), calls(call(0, call_id="x", name="f")), text("b"), text("c"), chunk(finish="stop"))
    assert notes.done == ["a", "f()", "bc"]
    assert notes.state
    assert [type(block) for block in notes.state.blocks] == [
        ContentStreamBlock,
        ToolCallStreamBlock,
        ContentStreamBlock,
    ]
    assert len({block.id for block in notes.state.blocks}) == 3


async def test_a_block_that_a_drop_cut_off_is_never_complete():
    notes = await noted(text("a"), calls(call(0, '{"x"', call_id="a", name="f")))
    assert notes.done == ["a"]
    assert notes.state
    assert not notes.state.blocks[-1].is_complete
    assert notes.state.finish_reason is None
    assert notes.ends == 1


async def test_calls_that_share_an_index_are_distinguished_by_their_ids():
    notes = Notes()
    out = await under(
        chunk_stream(notes),
        [
            calls(call(0, "{}", call_id="a", name="f")),
            calls(call(0, "[]", call_id="b", name="g")),
            chunk(finish="tool_calls"),
        ],
    )
    assert notes.done == ["f({})", "g([])"]
    assert [tool["index"] for c in out for tool in c["choices"][0]["delta"].get("tool_calls") or []] == [0, 1]


async def test_calls_without_an_index_are_distinguished_by_their_ids():
    notes = await noted(
        calls(call(None, "{", call_id="a", name="f")),
        calls(call(None, "}")),
        calls(call(None, "[]", call_id="b", name="g")),
        chunk(finish="tool_calls"),
    )
    assert notes.done == ["f({})", "g([])"]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ([calls(call(0, call_id="a", name="f")), text("x"), calls(call(0, "{}"))], "more of call 0"),
        ([calls(call(0, call_id="a", name="f")), calls(call(0, name="g"))], "becomes one of 'g'"),
        ([{"choices": [{"index": 0, "delta": {}}, {"index": 1, "delta": {"content": "x"}}]}], "one choice"),
        ([{"choices": [{"index": 1, "delta": {"content": "x"}}]}], "one choice"),
        ([chunk({"tool_calls": [{"index": 0, "function": {"arguments": {"x": 1}}}]})], "arguments is not a string"),
        ([chunk({"content": [{"type": "text", "text": "x"}]})], "content is not a string"),
    ],
    ids=["late fragment", "another name", "two choices", "second choice", "parsed arguments", "content parts"],
)
async def test_chunks_that_policies_cannot_judge_are_malformed(bad: list[Any], problem: str):
    with pytest.raises(Malformed, match=problem):
        await noted(*bad)


async def test_objects_of_the_sdk_pass_as_they_are_and_what_is_new_is_of_their_kind():
    chunks = [
        ChatCompletionChunk.model_validate(c)
        for c in (
            calls(call(0, "{}", call_id="a", name="f")),
            calls(call(1, "{}", call_id="b", name="g"), finish="tool_calls"),
        )
    ]
    out = await under(chunk_stream(CallsApart(["f"])), chunks)
    assert all(isinstance(c, ChatCompletionChunk) for c in out)
    assert [c.choices[0].delta.content for c in out if c.choices[0].delta.content] == ["[f blocked]"]
    (kept,) = [tool for c in out for tool in c.choices[0].delta.tool_calls or []]
    assert kept.function
    assert (kept.index, kept.id, kept.function.name) == (0, "b", "g")
    assert out[-1].choices[0].finish_reason == "tool_calls"
    passed = await under(chunk_stream(Notes()), chunks[:1])
    assert passed[0] is chunks[0]


async def test_the_finish_reason_is_stop_if_every_call_is_blocked():
    out = await under(
        chunk_stream(CallsApart(["f"])), [calls(call(0, "{}", call_id="a", name="f")), chunk(finish="tool_calls")]
    )
    assert [c["choices"][0]["finish_reason"] for c in out] == [None, "stop"]

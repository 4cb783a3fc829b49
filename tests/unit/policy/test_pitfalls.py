"""What people who write their first policy get wrong, or leave open: it works, or says so."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from tests.unit.policy.streams import call, calls, chunk, chunk_stream, completions, iterate, public_stream, text, under
from tests.unit.policy.test_public_events import ANSWER, check_sound
from tokenbus.client.response import Response
from tokenbus.events.public import TERMINAL, Chunk, Completed, Incomplete
from tokenbus.policy.apply import apply_policies
from tokenbus.policy.processor import NewText, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import ContentStreamBlock, OtherStreamBlock, StreamState, ToolCallStreamBlock

AZURE = {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []}
SAYS = [text("Hello "), text("you"), chunk(finish="stop")]


class AtEnd(StreamProcessor):
    async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
        await context.send(NewText("Bye."))


async def test_what_a_policy_says_at_the_end_comes_before_the_terminal_event() -> None:
    out = await under(public_stream(AtEnd(), AtEnd()), ANSWER)
    check_sound(out)
    assert isinstance(out[-1], Completed)
    assert [b.content for b in completions(out)][-2:] == ["Bye.", "Bye."]


async def test_what_a_policy_says_at_the_end_comes_before_the_finish_reason_and_usage_after_it() -> None:
    usage = {**AZURE, "usage": {"total_tokens": 3}}
    out = await under(chunk_stream(AtEnd()), [*SAYS, usage])
    assert [c["choices"][0]["delta"].get("content") for c in out[:-2]] == ["Hello ", "you", "Bye."]
    assert out[-2]["choices"][0]["finish_reason"] == "stop"
    assert out[-1] == usage


async def test_a_stream_that_is_ended_at_its_end_is_no_success() -> None:
    class Ends(StreamProcessor):
        async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
            context.terminate("on reflection")

    end = (await under(public_stream(Ends()), ANSWER))[-1]
    assert isinstance(end, Incomplete)
    assert end.error
    assert end.error.code == "policy_terminated"
    assert (await under(chunk_stream(Ends()), SAYS))[-1]["choices"][0]["finish_reason"] == "content_filter"


@pytest.mark.parametrize("as_objects", [False, True])
async def test_chunks_without_choices_pass_and_the_policy_may_emit_before_the_first_choice(as_objects: bool) -> None:
    class Greets(StreamProcessor):
        greeted = False

        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            if not self.greeted:
                self.greeted = True
                await context.send("First. ")
            await context.send(chunk)

    source: list[Any] = [AZURE, *SAYS]
    if as_objects:
        source = [ChatCompletionChunk.model_construct(None, **AZURE), *map(ChatCompletionChunk.model_validate, SAYS)]
    out = [c if isinstance(c, dict) else c.model_dump() for c in await under(chunk_stream(Greets()), source)]
    contents = [c["choices"][0]["delta"].get("content") for c in out if c["choices"]]
    assert contents[:-1] == ["First. ", "Hello ", "you"]
    assert sum(not c["choices"] for c in out) == 1


async def test_a_text_may_be_sent_unchanged_and_an_invalid_value_is_a_policy_error() -> None:
    class Sends(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            await context.send("!" if state.just_completed else chunk)
            if state.finish_reason:
                await context.send(7)

    stream = chunk_stream(Sends())
    out = await under(stream, SAYS)
    assert "!" in [c["choices"][0]["delta"].get("content") for c in out]
    assert stream.terminated
    assert "TypeError: a policy sent a int" in stream.terminated.reason
    passing = chunk_stream(Sends(), on_error="pass")
    assert (await under(passing, SAYS))[-1]["choices"][0]["finish_reason"] == "stop"
    assert not passing.terminated


async def test_a_forgotten_await_still_sends() -> None:
    class Forgets(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            context.send(chunk)

    assert await under(public_stream(Forgets()), ANSWER) == ANSWER


async def test_only_a_function_or_a_class_is_a_policy() -> None:
    async def loud(chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        await context.send(context.with_text(chunk, context.text(chunk).upper()))

    out = [event async for event in apply_policies(iterate(ANSWER), loud, AtEnd)]
    check_sound(out)
    assert Response.of(out).text == "HELLO YOUBye."
    wrong: Any = 7
    with pytest.raises(TypeError, match="7 is not a policy"):
        await anext(apply_policies(iterate(ANSWER), wrong))


async def test_an_empty_content_with_calls_is_not_sent() -> None:
    first = chunk({"content": "", "tool_calls": [call(0, "{}", call_id="a", name="f")]})
    out = await under(chunk_stream(StreamProcessor()), [first, chunk(finish="tool_calls")])
    assert out[0]["choices"][0]["delta"]["content"] is None
    assert first["choices"][0]["delta"]["content"] == "", "the source's own chunk is not changed"


class PerCall(StreamProcessor):
    """The third usage pattern, written by `current_block`: each call is held until it is complete, then judged."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.buffer: list[Any] = []

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if not isinstance(state.current_block, ToolCallStreamBlock) or state.finish_reason:
            await context.send(chunk)
            return
        if isinstance(done := state.just_completed, ToolCallStreamBlock) and done is not state.current_block:
            await self.judged(done, context)  # this chunk begins the next one
            self.buffer.append(chunk)
            return
        self.buffer.append(chunk)
        if state.just_completed:
            await self.judged(state.current_block, context)

    async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
        if isinstance(state.current_block, ToolCallStreamBlock) and state.current_block.is_complete:
            await self.judged(state.current_block, context)

    async def judged(self, block: ToolCallStreamBlock, context: StreamContext[Any]) -> None:
        held, self.buffer = self.buffer, []
        for item in held if block.name != "forbidden" else ():
            await context.send(item)


TWO = [
    text("Let me see."),
    calls(call(0, call_id="a", name="forbidden")),
    calls(call(0, '{"x":')),
    calls(call(0, "1}")),
    calls(call(1, call_id="b", name="fine")),
    calls(call(1, "{}")),
    chunk(finish="tool_calls"),
]


async def test_of_two_parallel_calls_the_forbidden_one_is_never_published() -> None:
    out = await under(chunk_stream(PerCall()), TWO)
    deltas = [c["choices"][0]["delta"] for c in out]
    assert [d["content"] for d in deltas if d.get("content")] == ["Let me see."]
    fragments = [f for d in deltas for f in d.get("tool_calls") or ()]
    assert {f["index"] for f in fragments} == {0}
    assert [f["function"].get("name") for f in fragments if f["function"].get("name")] == ["fine"]
    assert "".join(f["function"]["arguments"] for f in fragments) == "{}"
    assert out[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_events_that_end_a_run_are_those_that_wait() -> None:
    words = public_stream(AtEnd())._links[0]._words
    assert all(words.is_end(event) == isinstance(event, TERMINAL) for event in ANSWER)
    assert any(isinstance(event, Chunk) for event in ANSWER)


async def test_a_block_of_the_state_may_be_sent_and_goes_out_as_a_new_one() -> None:
    class Sends(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            if isinstance(state.just_completed, ContentStreamBlock | ToolCallStreamBlock):
                await context.send(state.just_completed)
            elif state.chunk_block is None:
                await context.send(chunk)

    out = await under(public_stream(Sends()), ANSWER)
    check_sound(out)
    plain = Response.of(ANSWER)
    assert Response.of(out).text == plain.text
    assert [(c.tool_id, c.tool_name, c.arguments) for c in Response.of(out).tool_calls] == [
        (c.tool_id, c.tool_name, c.arguments) for c in plain.tool_calls
    ]


async def test_a_block_that_cannot_be_sent_is_refused_with_what_to_send() -> None:
    problems: list[str] = []

    class Sends(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            try:
                await context.send(OtherStreamBlock("t", 0, other_kind="thinking"))
            except TypeError as e:
                problems.append(str(e))
            await context.send(chunk)

    await under(public_stream(Sends()), ANSWER)
    assert all("send the chunks of a block of kind thinking" in problem for problem in problems)
    assert problems

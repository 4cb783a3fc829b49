"""Chains of policies, work that is put off, and policies that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tests.unit.policy.streams import (
    CallsApart,
    Notes,
    UntilComplete,
    actions,
    call,
    calls,
    chunk,
    chunk_stream,
    iterate,
    public_stream,
    text,
    under,
)
from tests.unit.policy.test_public_events import ANSWER
from tests.waiting import eventually
from tokenbus.events.public import Incomplete
from tokenbus.policy.apply import apply_policies
from tokenbus.policy.builtin.rewrite import ReplaceText
from tokenbus.policy.builtin.tool_call_gate import Block, ToolCallGate, Verdict
from tokenbus.policy.processor import Decision, NewText, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState, ToolCallStreamBlock

TWO_CALLS = [
    text("Hi"),
    calls(call(0, "{}", call_id="a", name="f")),
    calls(call(1, "[]", call_id="b", name="g")),
    text("there"),
    chunk(finish="tool_calls"),
]


def contents(chunks: Sequence[dict[str, Any]]) -> list[str]:
    """Texts and names of calls, in order."""
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    contents_by_chunk = [
        [d.get("content"), *(t["function"].get("name") for t in d.get("tool_calls") or [])] for d in deltas
    ]
    return [word for words in contents_by_chunk for word in words if word]


class Judge(ToolCallGate):
    side_by_side = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, asyncio.Future[Verdict]] = {}

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        self.asked[call.name] = asyncio.get_running_loop().create_future()
        return await self.asked[call.name]


class FailsAt(StreamProcessor):
    """Holds texts back, and raises at one of them."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if context.text(chunk) == self._at:
            raise RuntimeError("broken")


class Hangs(StreamProcessor):
    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        await asyncio.Event().wait()


async def test_the_next_policy_sees_what_a_policy_adds():
    notes = Notes()
    out = await under(chunk_stream(CallsApart(["f"]), notes), TWO_CALLS)
    assert notes.done == ["Hi[f blocked]", "g([])", "there"]
    assert contents(out) == ["Hi", "[f blocked]", "g", "there"]


async def test_a_policy_that_ends_the_stream_lets_those_after_it_finish():
    class Stops(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            await context.send(NewText("stop here"))
            context.terminate("enough")

    notes = Notes()
    stream = chunk_stream(Stops(), UntilComplete(), notes)
    out = await under(stream, TWO_CALLS)
    assert contents(out) == ["stop here"]
    assert out[-1]["choices"][0]["finish_reason"] == "content_filter"
    assert notes.ends == 1
    assert stream.terminated
    assert (stream.terminated.policy, stream.terminated.reason) == ("Stops", "enough")


async def test_text_flows_on_while_calls_are_judged_side_by_side_and_they_go_out_in_order():
    judge = Judge()
    stream = chunk_stream(judge)
    out: list[Any] = []
    for item in TWO_CALLS[:-1]:
        out += await stream.feed(item)
    await eventually(lambda: len(judge.asked) == 2)
    assert contents(out) == ["Hi", "there"]

    judge.asked["g"].set_result(None)
    await eventually(judge.asked["g"].done)
    assert contents(await stream.collect()) == []
    finishing = asyncio.create_task(stream.feed(TWO_CALLS[-1]))
    judge.asked["f"].set_result(None)
    out += await finishing
    out += await stream.end()
    assert contents(out) == ["Hi", "there", "f", "g"]
    assert [c["choices"][0]["finish_reason"] for c in out][-1] == "tool_calls"


async def test_released_output_is_published_although_the_source_is_silent():
    judge = Judge()
    more: asyncio.Queue[Any] = asyncio.Queue()

    async def source() -> AsyncGenerator[Any]:
        while item := await more.get():
            yield item

    for item in TWO_CALLS[:3]:
        more.put_nowait(item)
    out = apply_policies(source(), judge)
    assert contents([await anext(out)]) == ["Hi"]
    waiting = asyncio.ensure_future(anext(out))
    await eventually(lambda: "f" in judge.asked)
    judge.asked["f"].set_result(Block("no", "[no]"))
    assert contents([await waiting]) == ["[no]"]
    more.put_nowait(None)
    assert [c async for c in out] == [], "a call that breaks off is let out"


async def test_the_end_waits_for_all_that_was_put_off():
    judge = Judge()
    stream = chunk_stream(judge, Notes())
    for item in TWO_CALLS[:4]:
        await stream.feed(item)
    ending = asyncio.create_task(stream.end())
    await eventually(lambda: len(judge.asked) == 2)
    judge.asked["g"].set_result(None)
    judge.asked["f"].set_result(Block("no", "[no]"))
    assert contents(await ending) == ["[no]", "g"]
    assert stream.pending == []


async def test_a_failing_policy_ends_the_stream_by_default():
    stream = chunk_stream(FailsAt("there"))
    out = await under(stream, TWO_CALLS)
    assert contents(out) == []
    assert out[-1]["choices"][0]["finish_reason"] == "content_filter"
    assert stream.terminated
    assert stream.terminated.reason == "RuntimeError: broken"


async def test_with_on_error_pass_withheld_text_is_released_and_the_stream_continues():
    stream = chunk_stream(FailsAt("there"), on_error="pass")
    assert await under(stream, TWO_CALLS) == TWO_CALLS
    assert actions(stream.decisions()) == ["error"]


async def test_with_on_error_pass_what_was_blocked_stays_blocked():
    class BlocksThenFails(CallsApart):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            if state.finish_reason:
                raise RuntimeError
            await super().on_chunk(chunk, state, context)

    stream = chunk_stream(BlocksThenFails(["f"]), on_error="pass")
    out = await under(stream, TWO_CALLS)
    assert contents(out) == ["Hi", "[f blocked]", "g", "there"]
    assert actions(stream.decisions()) == ["block", "error"]


@pytest.mark.parametrize(("on_error", "left"), [("block", ["Hi"]), ("pass", ["Hi", "f"])])
async def test_a_failed_judge_blocks_or_passes_its_call(on_error: str, left: list[str]):
    judge = Judge()
    stream = chunk_stream(judge, on_error=on_error)
    out = await stream.feed(TWO_CALLS[0])
    out += await stream.feed(TWO_CALLS[1])
    assert not judge.asked, "the call is complete with the finish reason"
    finishing = asyncio.create_task(stream.feed(TWO_CALLS[-1]))
    await eventually(lambda: "f" in judge.asked)
    judge.asked["f"].set_exception(RuntimeError("no answer"))
    out += await finishing
    assert contents(out) == left
    assert actions(stream.decisions()) == ["error"]
    assert bool(stream.terminated) == (on_error == "block")


async def test_a_call_that_takes_too_long_is_an_error():
    stream = chunk_stream(Hangs(), on_error="pass", timeout_s=0.01)
    assert await under(stream, TWO_CALLS) == TWO_CALLS
    (decision,) = stream.decisions()
    assert decision.reason == "TimeoutError: no answer in 0.01 s"


class AwaitsWhatWasCancelled(StreamProcessor):
    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        answer = asyncio.get_running_loop().create_future()
        answer.cancel()
        await answer


@pytest.mark.parametrize(("on_error", "left"), [("block", []), ("pass", ["Hi", "f", "g", "there"])])
async def test_a_policy_that_awaits_what_was_cancelled_has_failed(on_error: str, left: list[str]):
    stream = chunk_stream(AwaitsWhatWasCancelled(), on_error=on_error)
    assert contents(await under(stream, TWO_CALLS)) == left
    (decision,) = stream.decisions()
    assert (decision.action, decision.reason) == ("error", "CancelledError: ")


async def test_so_has_a_judge():
    stream = chunk_stream(judge := Judge())
    await stream.feed(TWO_CALLS[0])
    await stream.feed(TWO_CALLS[1])
    finishing = asyncio.create_task(stream.feed(TWO_CALLS[-1]))
    await eventually(lambda: "f" in judge.asked)
    judge.asked["f"].cancel()
    await finishing
    assert stream.terminated
    assert stream.terminated.action == "error"


async def test_a_cancel_of_the_stream_itself_is_no_failure_of_its_policy():
    stream = chunk_stream(Hangs(), on_error="pass")
    task = asyncio.create_task(under(stream, TWO_CALLS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.decisions() == []


async def test_the_source_is_closed_when_a_policy_ends_the_stream():
    closed = asyncio.Event()

    async def source() -> AsyncGenerator[Any]:
        try:
            for item in TWO_CALLS:
                yield item
        finally:
            closed.set()

    out = [c async for c in apply_policies(source(), FailsAt("Hi"))]
    assert closed.is_set()
    assert len(out) == 1


async def test_an_error_of_the_source_is_raised_after_what_came_before():
    async def source() -> AsyncGenerator[Any]:
        yield TWO_CALLS[0]
        raise ConnectionError

    received: list[Any] = []
    out = apply_policies(source(), Notes())
    received.append(await anext(out))
    with pytest.raises(ConnectionError):
        await anext(out)
    assert received == TWO_CALLS[:1]


async def test_a_run_whose_stream_a_policy_ends_is_cancelled_before_its_end_is_published():
    class Bus:
        cancelled: tuple[str, str] | None = None

        async def cancel(self, run: str, reason: str) -> None:
            self.cancelled = run, reason

    class Stops(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            assert context.run == "r1"
            if state.just_completed:
                context.terminate()
            await context.send(chunk)

    bus = Bus()
    decisions: list[Decision] = []
    events = apply_policies(iterate(ANSWER), Stops(), client=bus, on_decision=decisions.append)  # pyright: ignore[reportArgumentType]
    out = [(event, bus.cancelled) async for event in events]
    end, cancelled = out[-1]
    assert isinstance(end, Incomplete)
    assert end.finish == "content_filter"
    assert cancelled == ("r1", "policy Stops")
    assert out[0][1] is None
    assert actions(decisions) == ["terminate"]


async def test_a_policy_that_ends_the_stream_keeps_the_replacement_of_an_earlier_one_on_record():
    class Stops(StreamProcessor):
        async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
            if context.text(chunk).startswith("Hi"):
                context.terminate("enough")
            await context.send(chunk)

    replaces = ReplaceText.from_options({"rules": [{"find": "Hello", "replace": "Hi"}]})
    stream = public_stream(replaces, Stops())
    await under(stream, ANSWER)
    decided = stream.decisions()
    assert actions(decided) == ["replace", "terminate"]
    assert (decided[0].original, decided[0].final) == ("Hello ", "Hi ")


async def test_no_event_gives_no_event():
    assert [event async for event in apply_policies(iterate([]), Notes())] == []


async def test_any_iterator_will_do():
    assert [c async for c in apply_policies(iterate(TWO_CALLS), Notes(), Notes())] == TWO_CALLS


class EndsAt(StreamProcessor):
    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        await context.send(chunk)
        if "stop" in context.text(chunk):
            context.terminate("enough")


async def test_what_a_policy_replaced_is_recorded_also_where_a_later_one_ends_the_stream():
    rules = ReplaceText.from_options({"rules": [{"find": "red", "replace": "blue"}]})
    stream = chunk_stream(rules, EndsAt())
    await under(stream, [text("a red "), text("stop "), text("fish"), chunk(finish="stop")])
    replaced, ended = stream.decisions()
    assert (replaced.action, replaced.original, replaced.final) == ("replace", "a red stop ", "a blue stop ")
    assert (ended.policy, ended.action) == ("EndsAt", "terminate")
    assert stream.terminated == ended

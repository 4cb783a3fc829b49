"""Policies over a bus subscription, beside the services: a text is rewritten, a model judges, a run is stopped."""

from __future__ import annotations

import pytest

from tests.examples.conftest import Deployment
from tokenbus import Chunk, Response
from tokenbus.errors import RunCancelled
from tokenbus.policy.apply import apply_policies
from tokenbus.policy.builtin.model_judge import CallJudge, CallJudgeOptions
from tokenbus.policy.builtin.rewrite import ReplaceText
from tokenbus.policy.processor import Decision, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState


class StopsAtPears(StreamProcessor):
    async def on_chunk(self, chunk: object, state: StreamState, context: StreamContext[object]) -> None:
        if isinstance(chunk, Chunk) and "pear" in (text := state.blocks[-1].text):
            # All of it may have come in one chunk.
            if before := text[len(text) - len(chunk.text) : text.index("pear")]:
                await context.send(context.with_text(chunk, before))
            context.terminate("pears")
            return
        await context.send(chunk)


async def test_policies_run_while_the_answer_streams(deployment: Deployment) -> None:
    bus = deployment.bus
    names = ReplaceText.from_options({"rules": [{"find": "Dr. Grey", "replace": "Somebody"}]})
    tale = Response.of([e async for e in apply_policies(bus.stream(deployment.request("tale")), names)])
    assert tale.text == "Somebody came in. Nobody saw her! That was all."
    assert tale.blocks[0].content == tale.text

    judge = CallJudge(CallJudgeOptions(provider="anthropic", model="strict", notice="Blocked: {reason}."))
    decisions: list[Decision] = []
    tools = [{"name": "weather", "parameters": {"type": "object"}}]
    request = bus.stream(deployment.request("asks", tools=tools))
    received = Response.of([e async for e in apply_policies(request, judge, client=bus, on_decision=decisions.append)])
    assert not received.tool_calls
    assert received.text.startswith("Blocked: it is nobody's business.")
    assert [(d.action, d.tool_name) for d in decisions] == [("block", "weather")]

    run = await bus.publish(deployment.request("fruit"))
    fruit = Response.of([e async for e in apply_policies(run.events(), StopsAtPears(), client=bus)])
    assert fruit.finish == "content_filter"
    assert "kumquat" in fruit.text
    assert "pear" not in fruit.text
    with pytest.raises(RunCancelled):
        await run.result()

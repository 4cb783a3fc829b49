"""Streams to put policies on, and policies that write down what they were called with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec

from tests.unit.core.run.script import Story
from tests.unit.providers.corpus import Recording
from tests.unit.providers.reading import read
from tokenbus.events.public import BlockComplete, PublicEvent
from tokenbus.policy.builtin.tool_call_gate import Block, ToolCallGate, Verdict
from tokenbus.policy.openai import OpenAIChunks
from tokenbus.policy.policy_runner import BoundPolicy, Handling, PolicyStream
from tokenbus.policy.processor import Decision, StreamContext, StreamProcessor
from tokenbus.policy.public import PublicEvents
from tokenbus.policy.stream_state import ContentStreamBlock, StreamBlock, StreamState, ToolCallStreamBlock

ELAPSED_MS = 77


def chunk(delta: dict[str, Any] | None = None, *, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


def text(content: str, **more: Any) -> dict[str, Any]:
    return chunk({"content": content}, **more)


def call(
    index: int | None, arguments: str = "", *, call_id: str | None = None, name: str | None = None
) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": call_id, "type": "function"} if call_id else {})


def calls(*deltas: dict[str, Any], **more: Any) -> dict[str, Any]:
    return chunk({"tool_calls": list(deltas)}, **more)


def recorded_events(row: Recording) -> list[PublicEvent]:
    """The public events of a run of one turn, as the parser makes them of this stream."""
    story = Story(max_tool_depth=0, on_failure="fail")
    for event in read(row.api_name, row.data):
        story.provider(event)
    return story.events


def recorded_chunks(row: Recording) -> list[dict[str, Any]]:
    """The chunks of a Chat Completions stream."""
    lines = [line[5:].strip() for line in row.data.splitlines() if line.startswith(b"data:")]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


def public_stream(*policies: StreamProcessor, **handling: Any) -> PolicyStream[PublicEvent]:
    return PolicyStream(_links(policies, handling), PublicEvents(lambda: ELAPSED_MS), run="r1")


def chunk_stream(*policies: StreamProcessor, **handling: Any) -> PolicyStream[Any]:
    return PolicyStream(_links(policies, handling), OpenAIChunks(), run="r1")


def _links(policies: Sequence[StreamProcessor], handling: dict[str, Any]) -> list[BoundPolicy]:
    return [BoundPolicy(type(policy).__name__, policy, Handling(**handling)) for policy in policies]


async def under(stream: PolicyStream[Any], chunks: Iterable[Any]) -> list[Any]:
    """All that comes out."""
    out: list[Any] = []
    for item in chunks:
        out += await stream.feed(item)
    out += await stream.end()
    await stream.close()
    return out


async def iterate(chunks: Iterable[Any]) -> AsyncGenerator[Any]:
    for item in chunks:
        yield item


class Notes(StreamProcessor):
    """Lets everything through, and writes down each call."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.calls: list[tuple[StreamBlock | None, str | None]] = []
        """What was just complete, and the finish reason."""
        self.done: list[str] = []
        self.state: StreamState | None = None
        self.ends = 0

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        self.calls.append((state.just_completed, state.finish_reason))
        if block := state.just_completed:
            self.done.append(content_of(block))
        self.state = state
        await context.send(chunk)

    async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
        self.ends += 1


class UntilComplete(StreamProcessor):
    """Usage pattern: everything is held until the stream is complete."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.held: list[Any] = []

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        self.held.append(chunk)
        if state.finish_reason:
            for held in self.held:
                await context.send(held)
            self.held.clear()


class CallsApart(ToolCallGate):
    """Usage pattern: text flows on, each call is held until it is complete, and judged by its name."""

    def __init__(self, blocked: Iterable[str] = ()) -> None:
        super().__init__()
        self.blocked = set(blocked)

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        return Block("not allowed", f"[{call.name} blocked]") if call.name in self.blocked else None


def content_of(block: StreamBlock) -> str:
    if isinstance(block, ToolCallStreamBlock):
        return f"{block.name}({block.arguments})"
    return block.content if isinstance(block, ContentStreamBlock) else block.kind


def completions(events: Iterable[PublicEvent]) -> list[BlockComplete]:
    return [event for event in events if isinstance(event, BlockComplete)]


def actions(decisions: Iterable[Decision]) -> list[str]:
    return [decision.action for decision in decisions]

"""Content that providers repeat under other ids or positions, or split, is published once by the running services."""

from __future__ import annotations

from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import PIPELINE, ended
from tests.unit.providers import test_said_once as shared
from tests.unit.providers.reading import sse
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, Random, Script, Turn, Wire

CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city":"Bern"}'}
SHIFTED = [
    shared.CREATED,
    shared.event("reasoning_text.delta", 0, content_index=0, delta="Hm."),
    shared.event("reasoning_summary_text.done", 0, summary_index=0, text="Hm."),
    shared.item("done", 0, "reasoning", summary=shared.texts("Hm.")),
    shared.item("added", 1, "message", id="m"),
    *shared.deltas(*shared.HA, index=1, content_index=1, item_id="m"),
    shared.event("output_text.done", 1, content_index=0, text="ha ha"),
    shared.item("done", 1, **shared.message("ha ha", id="m")),
    shared.item("added", 2, **{**CALL, "arguments": ""}),
    shared.event("function_call_arguments.delta", 2, delta=CALL["arguments"]),
    shared.item("done", 5, **CALL),
    shared.completed(shared.message("ha ha"), CALL),
]
WITHOUT_POSITIONS = [{name: value for name, value in event.items() if name != "output_index"} for event in SHIFTED]
MINIMAX = [
    shared.thinks("Hm."),
    *(shared.chunk(content=piece) for piece in ("<think>Hm.</think>", *shared.HA)),
    shared.chunk(tool_calls=[{"index": 0, "id": "c", "function": {"name": "weather", "arguments": CALL["arguments"]}}]),
    shared.chunk("tool_calls"),
    shared.whole(
        "tool_calls",
        content="<think>Hm.</think>ha ha",
        reasoning_content="Hm.",
        tool_calls=[{"id": "c", "function": {"name": "weather", "arguments": CALL["arguments"]}}],
    ),
    shared.DONE,
]
TOOL = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bern"}}
DIALECT = [
    shared.begun({"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "ha"}),
    shared.starts(0, type="thinking", thinking=""),
    *shared.grows(0, "H", "m.", kind="thinking"),
    shared.stops(0),
    shared.starts(1, type="text", text="ha"),
    *shared.grows(1, *shared.HA),
    shared.stops(1),
    shared.starts(2, **TOOL),
    shared.stops(2),
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
STREAMS = {
    "shifted": ("openai-responses", SHIFTED),
    "without": ("openai-responses", WITHOUT_POSITIONS),
    "minimax": ("openai-chat", MINIMAX),
    "dialect": ("anthropic", DIALECT),
}
HALVES = {
    "anthropic": [
        shared.begun(),
        shared.starts(0, type="text", text=""),
        *shared.grows(0, "a HIGH", "LOW b"),
        shared.stops(0),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ],
    "openai-chat": [shared.chunk(content="a HIGH"), shared.chunk(content="LOW b"), shared.chunk("stop"), shared.DONE],
    "openai-responses": [
        shared.CREATED,
        *shared.deltas("a HIGH", "LOW b"),
        shared.completed(shared.message("a HIGHLOW b")),
    ],
    "gemini": [
        {"candidates": [{"content": {"parts": [{"text": "a HIGH"}]}}]},
        {"candidates": [{"content": {"parts": [{"text": "LOW b"}]}, "finishReason": "STOP"}]},
    ],
}


def wire(name: str, stream: bytes) -> Script:
    """The stream, each read cut somewhere else."""
    return Script(
        name=name, turns=(Turn(says=Wire(stream=stream), delivery=Delivery(cuts=Random(seed=7, largest=40))),)
    )


def halved(events: list[Any]) -> bytes:
    return sse(*events).replace(b"HIGH", b"\\ud83d").replace(b"LOW", b"\\ude00")


async def test_a_repeated_provider_event_is_published_once(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    scripts = [wire(name, sse(*events)) for name, (_, events) in STREAMS.items()]
    scripts += [wire(f"halves-{api}", halved(events)) for api, events in HALVES.items()]
    async with deployed(scripts, PIPELINE):
        runs = {
            name: await send(name, provider=api, tools=[WEATHER], max_tool_depth=0)
            for name, (api, _) in STREAMS.items()
        }
        whole = {api: await send(f"halves-{api}", provider=api) for api in HALVES}
        prefilled = await send("halves-anthropic", mode="prefill", participant="Claude")
        logs: Any = await ended(server.client, keys, [*runs.values(), *whole.values(), prefilled])
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed"
    for name, run in runs.items():
        blocks = [
            (kind, content.replace(" ", "") if kind == "tool_call" else content)
            for kind, content in judge.blocks(logs[run])
        ]
        assert blocks == [("thinking", "Hm."), ("text", "ha ha"), ("tool_call", '{"city":"Bern"}')], name
        assert logs[run][-1]["finish"] == "tool_use"
    for run in (*whole.values(), prefilled):
        assert judge.blocks(logs[run]) == [("text", "a \N{GRINNING FACE} b")]


async def test_no_other_participants_text_is_emitted_for_any_number_of_participants(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    """The provider gets ten names as stop strings, and would continue as the eleventh."""
    crowd = [{"role": "user", "participant": f"P{i}", "content": "Hello."} for i in range(14)]
    first, *deltas = (
        shared.begun(),
        shared.starts(0, type="text", text=""),
        *shared.grows(0, " Hi all.\nP", "0", ": never heard"),
    )
    end = [shared.stops(0), {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}]
    script = wire("crowd", sse(first, *deltas, *end))
    async with deployed([script], PIPELINE):
        run = await send("crowd", mode="prefill", participant="Claude", messages=crowd)
        logs: Any = await ended(server.client, keys, [run])
    judge.check(logs[run])
    assert judge.blocks(logs[run]) == [("text", "Hi all.")]
    assert logs[run][-1]["stop_string"] == "\nP0:"

"""AG-UI: the request to the bus, and the events for an agent's client. Pure parts only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ag_ui.core import Event
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.rows import over_rows
from tests.services.gateway.logs import (
    BUSY,
    DONE,
    ROWS,
    Log,
    any_log,
    call,
    log_of,
    recorded_events,
    streamed,
    text,
    thinking,
    visible_text,
)
from tests.services.gateway.rules import gateway_request, refused, rules, translated
from tests.unit.providers.corpus import Recording
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested, ToolReturned
from tokenbus.events.public import TERMINAL, Retrying
from tokenbus.events.requests import (
    DocumentPart,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ag_ui.encoder import AgUiStream

SURFACE = AgUiSurface()
GIVEN: list[dict[str, Any]] = [{"id": "u1", "role": "user", "content": "Hello"}]
VALID: TypeAdapter[Any] = TypeAdapter(Event)
"""The models of the protocol's own Python package: fields, not order."""


def encoder(join_at: int = -1) -> AgUiStream:
    return AgUiStream("r1", thread="t", client_run="run", given=GIVEN, model="m", join_at=join_at)


def events(log: Log, join_at: int = -1) -> list[dict[str, Any]]:
    encoded = streamed(encoder(join_at), log).decode().split("\n\n")
    assert encoded.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event and "\r" not in event for event in encoded)
    read = [msgspec.json.decode(event.removeprefix("data: ")) for event in encoded]
    for event in read:
        VALID.validate_python(event)
        assert None not in event.values()
    return read


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


class Agent:
    """The conversation as the client builds it, with the rules of `verifyEvents`."""

    def __init__(self, events: list[dict[str, Any]], had: list[dict[str, Any]] = GIVEN) -> None:
        self.messages = [dict(message) for message in had]
        self.open: set[tuple[str, str]] = set()
        self.ended: str | None = None
        assert not events or events[0]["type"] == "RUN_STARTED"
        for event in events:
            assert self.ended is None
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind: str = event["type"]
        span, _, step = kind.rpartition("_")
        name = event.get("messageId") or event.get("toolCallId") or event.get("stepName", "")
        match step:
            case "START" | "STARTED" if span != "RUN":
                assert (span, name) not in self.open
                self.open.add((span, name))
            case "END" | "FINISHED" if span != "RUN":
                self.open.remove((span, name))
            case "CONTENT" | "ARGS":
                assert (span, name) in self.open
            case _:
                pass
        match kind:
            case "TEXT_MESSAGE_START" | "REASONING_MESSAGE_START":
                if not self._message(name):
                    self.messages.append({"id": name, "role": event["role"], "content": ""})
            case "TEXT_MESSAGE_CONTENT" | "REASONING_MESSAGE_CONTENT":
                message = self._message(name)
                assert message
                message["content"] = message.get("content", "") + event["delta"]
            case "TOOL_CALL_START":
                if not self._call(name):
                    parent = self._message(event["parentMessageId"])
                    if parent is None:
                        parent = {"id": event["parentMessageId"], "role": "assistant"}
                        self.messages.append(parent)
                    parent.setdefault("toolCalls", []).append({"id": name, "arguments": ""})
            case "TOOL_CALL_ARGS":
                found = self._of(name)
                function = found.get("function", found)
                function["arguments"] += event["delta"]
            case "REASONING_ENCRYPTED_VALUE":
                self._of(event["entityId"])["encryptedValue"] = event["encryptedValue"]
            case "TOOL_CALL_RESULT":
                self.messages.append({"id": event["messageId"], "role": "tool", "content": event["content"]})
            case "MESSAGES_SNAPSHOT":
                new = {
                    message["id"]: msgspec.json.decode(msgspec.json.encode(message)) for message in event["messages"]
                }
                assert len(new) == len(event["messages"])
                reasoned = any(message["role"] == "reasoning" for message in new.values())
                kept = [m for m in self.messages if m["id"] in new or (m["role"] == "reasoning" and not reasoned)]
                self.messages = [new.pop(m["id"], m) for m in kept]
                self.messages += new.values()
            case "RUN_FINISHED":
                assert not self.open
                self.ended = event["outcome"]["type"]
            case "RUN_ERROR":
                self.ended = event["code"]
            case _:
                pass

    def _of(self, name: str) -> dict[str, Any]:
        found = self._message(name) or self._call(name)
        assert found
        return found

    def _message(self, name: str) -> dict[str, Any] | None:
        return next((message for message in self.messages if message["id"] == name), None)

    def _call(self, name: str) -> dict[str, Any] | None:
        calls = (each for message in self.messages for each in message.get("toolCalls", []))
        return next((each for each in calls if each["id"] == name), None)

    def texts(self, role: str = "assistant") -> str:
        return "".join(m.get("content", "") for m in self.messages if m["role"] == role)

    def calls(self) -> dict[str, str]:
        calls = (each for message in self.messages for each in message.get("toolCalls", []))
        return {each["id"]: each.get("function", each)["arguments"] for each in calls}


RETRIED = log_of(
    [*thinking(0, "Hm", signature="s"), *call(1, "c1", "f", '{"a"'), n.Failed(BUSY)],
    [*text(0, "Hi"), DONE],
)


def test_a_text_is_sent_in_its_step() -> None:
    encoded = events(log_of([*thinking(0, "Hm", signature="sig"), *text(1, "Hi"), DONE]))
    assert types(encoded) == [
        "RUN_STARTED",
        "STEP_STARTED",
        "REASONING_START",
        "REASONING_MESSAGE_START",
        "REASONING_MESSAGE_CONTENT",
        "REASONING_MESSAGE_END",
        "REASONING_ENCRYPTED_VALUE",
        "REASONING_END",
        "TEXT_MESSAGE_START",
        "TEXT_MESSAGE_CONTENT",
        "TEXT_MESSAGE_END",
        "CUSTOM",
        "STEP_FINISHED",
        "RUN_FINISHED",
    ]
    assert (encoded[0]["threadId"], encoded[0]["runId"], encoded[0]["metadata"]) == (
        "t",
        "run",
        {"tokenbus": {"seq": 0, "run": "r1"}},
    )
    assert encoded[-1]["usage"] == [
        {"model": "m", "inputTokens": 9, "outputTokens": 5, "reasoningTokens": 2, "cachedInputTokens": 3}
    ]


def test_what_a_retry_voids_is_taken_back_by_a_snapshot() -> None:
    encoded = events(RETRIED)
    agent = Agent(encoded)
    assert types(encoded).count("MESSAGES_SNAPSHOT") == 1
    assert (agent.texts(), agent.texts("reasoning"), agent.calls()) == ("Hi", "", {})
    assert agent.ended == "success"


def test_a_text_that_continues_after_a_cut_stays_one_message() -> None:
    log = log_of(
        [n.BlockStart(0, "text"), n.TextDelta(0, "One "), *call(1, "c1", "f", "{"), n.Failed(BUSY)],
        [*text(0, "two."), DONE],
        on_failure="continue",
        continues=True,
    )
    agent = Agent(events(log))
    assert agent.texts() == visible_text(log)
    assert agent.calls() == {}


def test_a_client_that_joins_after_a_retry_loses_the_void_thinking_it_had() -> None:
    log = log_of([*thinking(0, "Let me ", "think."), n.Failed(BUSY)])
    retrying = next(event.seq for event in log if isinstance(event, Retrying))
    had = Agent(events(log[:4])).messages
    assert had[-1]["content"]
    joined = Agent(events(log, retrying), had)
    assert not joined.texts("reasoning")


def test_calls_of_the_client_are_named_as_pending() -> None:
    log = log_of([*call(0, "c1", "f", '{"a":', "1}"), n.Done("tool_use", "tool_use", None)], max_tool_depth=0)
    encoded = events(log)
    assert encoded[-1]["outcome"] == {"type": "success", "pendingToolCallIds": ["c1"]}
    assert Agent(encoded).calls() == {"c1": '{"a":1}'}


def test_a_call_that_the_bus_runs_has_its_result_and_is_not_pending() -> None:
    log = log_of(
        [*text(0, "I look."), *call(1, "c1", "weather", "{}"), n.Done("tool_use", "tool_use", None)],
        [ToolReturned(1, "no station", True)],
        [*text(0, "Rain."), DONE],
    )
    encoded = events(log)
    result = next(event for event in encoded if event["type"] == "TOOL_CALL_RESULT")
    assert (result["content"], result["metadata"]["tokenbus"]["is_error"]) == ("no station", True)
    assert encoded[-1]["outcome"] == {"type": "success"}
    call_start = next(event for event in encoded if event["type"] == "TOOL_CALL_START")
    assert call_start["parentMessageId"] == "r1:0"


def test_a_call_that_is_cut_is_taken_back() -> None:
    log = log_of(
        [*text(0, "Hi"), n.ToolCallStart(1, "c1", "f"), n.ToolCallDelta(1, '{"a'), n.Cut("reset")], max_tool_depth=0
    )
    got = events(log)
    assert [event["type"] for event in got][-5:] == [
        *("TOOL_CALL_ARGS", "TOOL_CALL_END", "TOOL_CALL_RESULT", "MESSAGES_SNAPSHOT", "RUN_ERROR")
    ]
    assert not any("toolCalls" in message for message in got[-2]["messages"])


def test_a_cut_and_a_failure_are_errors_with_the_code_of_the_bus() -> None:
    cut = events(log_of([n.BlockStart(0, "text"), n.TextDelta(0, "Hal"), n.Cut("reset")]))[-1]
    assert cut["type"] == "RUN_ERROR"
    failed = events(log_of([n.Failed(msgspec.structs.replace(BUSY, retryable=False, raw="account acme"))]))[-1]
    assert (failed["type"], failed["code"]) == ("RUN_ERROR", "overloaded_error")
    assert "acme" not in str(failed)


def test_a_cancel_is_an_outcome() -> None:
    encoded = events(log_of([n.BlockStart(0, "text"), n.TextDelta(0, "Hal")], [CancelRequested("stop", None)]))
    assert types(encoded)[-3:] == ["TEXT_MESSAGE_END", "STEP_FINISHED", "RUN_FINISHED"]
    assert encoded[-1]["outcome"] == {"type": "cancelled"}


@given(log=any_log())
def test_any_log_keeps_the_order_of_the_protocol_and_its_text_is_the_visible_text(log: Log) -> None:
    agent = Agent(events(log))
    assert agent.texts() == visible_text(log)
    assert (agent.ended is not None) == isinstance(log[-1], TERMINAL)


@given(log=any_log(), data=st.data())
def test_a_client_that_joins_at_any_point_has_what_one_has_that_read_from_the_beginning(
    log: Log, data: st.DataObject
) -> None:
    join_at = data.draw(st.integers(0, len(log) - 1))
    whole = Agent(events(log))
    had = Agent(events(log[: data.draw(st.integers(0, join_at))])).messages if data.draw(st.booleans()) else GIVEN
    joined = Agent(events(log, join_at), had)
    for role in ("assistant", "reasoning", "tool"):
        assert joined.texts(role) == whole.texts(role)
    assert joined.calls() == whole.calls()
    assert joined.ended == whole.ended


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_recorded_streams_are_encoded_completely(row: Recording) -> None:
    log = recorded_events(row)
    assert Agent(events(log)).texts() == visible_text(log)


def test_an_answer_that_breaks_ends_with_an_error() -> None:
    problem = Problem(status=503, code="gateway_restarting", message="x", kind="overloaded")
    stream = encoder()
    assert [b"RUN_STARTED" in stream.broken(problem)[0], stream.broken(problem)] == [True, []]


# --- requests ---------------------------------------------------------------------------------------------------------


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    props = {"model": "anthropic/m"}
    return {"threadId": "t", "runId": "run", "messages": messages or GIVEN, "forwardedProps": props, **more}


def test_the_input_of_a_run_becomes_a_request() -> None:
    tools = [{"name": "f", "description": "F", "parameters": {"type": "object"}}]
    context = [{"description": "Place", "value": "Bonn"}]
    translation = translated(
        SURFACE, gateway_request(body(tools=tools, context=context, state={}, resume=[], protocolVersion="1.0"))
    )
    assert (translation.generate.system, translation.generate.max_tool_depth) == ("Place:\nBonn", 0)
    assert translation.generate.tools == [Tool(name="f", description="F", parameters={"type": "object"})]
    assert (translation.stream, translation.on_disconnect) == (True, "continue")
    assert (translation.echo["thread"], translation.echo["run"]) == ("t", "run")


def test_options_are_read_from_the_forwarded_props() -> None:
    props = {"model": "fast", "temperature": 0.5, "maxTokens": 9, "tokenbus": {"tools": ["weather"]}}
    generate = translated(SURFACE, gateway_request(body(forwardedProps=props)), rules(tools=None)).generate
    assert (generate.temperature, generate.max_tokens, generate.provider) == (0.5, 9, "gemini")
    assert (generate.tools, generate.max_tool_depth) == ([Tool(name="weather")], 10)


def test_the_encoders_output_can_be_read_as_history() -> None:
    log = log_of(
        [*thinking(0, "Hm", signature="sig"), *call(1, "c1", "weather", "{}"), n.Done("tool_use", "tool_use", None)],
        [ToolReturned(1, "Rain.", False)],
        [*text(0, "Rain."), DONE],
    )
    snapshot = next(event for event in events(log, len(log) - 1) if event["type"] == "MESSAGES_SNAPSHOT")
    generate = translated(SURFACE, gateway_request(body(*snapshot["messages"]))).generate
    assert generate.messages == [
        Message(role="user", content=[TextPart(text="Hello")]),
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="Hm", signature="sig", opaque={"api": "anthropic", "provider": "anthropic"}),
                ToolCallPart(tool_id="c1", tool_name="weather", arguments="{}"),
            ],
        ),
        Message(role="tool", content=[ToolResultPart(tool_id="c1", content="Rain.")]),
        Message(role="assistant", content=[TextPart(text="Rain.")]),
    ]


def test_parts_of_a_users_message_become_images_and_documents() -> None:
    source = {"type": "url", "value": "https://example.org/a", "mimeType": "image/png"}
    content = [
        {"type": "text", "text": "See"},
        {"type": "image", "source": source},
        {"type": "document", "source": source},
    ]
    (message,) = translated(
        SURFACE, gateway_request(body({"id": "u", "role": "user", "content": content}))
    ).generate.messages
    url = UrlSource(url="https://example.org/a")
    assert message.content == [TextPart(text="See"), ImagePart(source=url), DocumentPart(source=url)]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"threadId": None}, "threadId"),
        ({"runId": ""}, "runId"),
        ({"messages": []}, "messages"),
        ({"messages": [{"id": "1", "role": "robot"}]}, "messages[0].role"),
        (
            {"messages": [{"id": "1", "role": "user", "content": [{"type": "audio", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"resume": [{"interruptId": "1", "status": "odd"}]}, "resume[0].status"),
        ({"resume": [{"status": "resolved"}]}, "resume[0].interruptId"),
        ({"resume": [{"interruptId": "1", "status": "resolved", "payload": []}]}, "resume[0].payload"),
        ({"tools": [{"description": "x"}]}, "tools[0].name"),
        ({"forwardedProps": {"model": "fast", "frobnicate": 1}}, "forwardedProps.frobnicate"),
        ({"forwardedProps": {"model": "nope"}}, "model"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    problem = refused(SURFACE, gateway_request({**body(), **change}))
    assert problem.param == param
    answer = SURFACE.refusal(problem)
    assert msgspec.json.decode(answer.body)["error"]["code"] == problem.code

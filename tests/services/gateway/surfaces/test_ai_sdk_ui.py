"""The AI SDK's UI message stream: the request to the bus, and the parts for `useChat`. Pure parts only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

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
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested, ToolReturned
from tokenbus.events.public import TERMINAL, Incomplete
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    ImagePart,
    Message,
    TextPart,
    Thinking,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui.encoder import UiStream
from tokenbus_services.gateway.surfaces.contract import GatewayNote

SURFACE = AiSdkUiSurface()
USER = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hello"}]}
CUT = n.Cut("connection reset")


def encoder(ui: int = 5, bus_tools: frozenset[str] = frozenset()) -> UiStream:
    return UiStream("r1", model="m", message_id="r1", ui=ui, bus_tools=bus_tools)


def parts(log: Log, ui: int = 5, bus_tools: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """The parts that a client receives, without the end marker."""
    data = streamed(encoder(ui, bus_tools), log).decode()
    events = data.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    payloads = [event.removeprefix("data: ") for event in events]
    if isinstance(log[-1], TERMINAL):
        assert payloads.pop() == "[DONE]"
    assert "[DONE]" not in payloads
    return [msgspec.json.decode(part) for part in payloads]


def types(events: list[dict[str, Any]]) -> list[str]:
    return [part["type"] for part in events if part["type"] not in ("message-metadata", "data-tokenbus")]


class Screen:
    """The message as the client builds it, with the errors that the client raises."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.parts: list[dict[str, Any]] = []
        self.error: str | None = None
        self.finish: str | None = None
        self.open: dict[tuple[str, str], dict[str, Any]] = {}
        assert events[0]["type"] == "start"
        for part in events:
            self._take(part)

    def _take(self, part: dict[str, Any]) -> None:
        kind: str = part["type"]
        name, _, _ = kind.rpartition("-")
        match kind:
            case "text-start" | "reasoning-start":
                assert (name, part["id"]) not in self.open
                self.open[name, part["id"]] = {"type": name, "text": ""}
                self.parts.append(self.open[name, part["id"]])
            case "text-delta" | "reasoning-delta":
                self.open[name, part["id"]]["text"] += part["delta"]
            case "text-end" | "reasoning-end":
                self.open.pop((name, part["id"])).update(providerMetadata=part.get("providerMetadata", {}))
            case "tool-input-start":
                self.parts.append({"type": f"tool-{part['toolName']}", **part, "state": "input-streaming"})
            case "tool-input-delta":
                assert self._call(part)["state"] == "input-streaming"
            case "tool-input-available":
                if not any(each.get("toolCallId") == part["toolCallId"] for each in self.parts):
                    self.parts.append({**part, "type": "dynamic-tool"})
                self._call(part).update(input=part["input"], state="input-available")
            case "tool-output-available":
                self._call(part).update(
                    output=part["output"], state="output-available", preliminary=part.get("preliminary")
                )
            case "tool-input-error" | "tool-output-error":
                self._call(part).update(
                    errorText=part["errorText"],
                    state="output-error",
                    resultProviderMetadata=part.get("providerMetadata"),
                )
            case "start-step":
                self.parts.append({"type": "step-start"})
            case "reset-step":
                while self.parts[-1]["type"] != "step-start":
                    self.parts.pop()
                self.open.clear()
            case "finish":
                self.finish = part["finishReason"]
            case "abort":
                self.finish = "abort"
            case "error":
                self.error = part["errorText"]
            case _:
                assert kind in (
                    "start",
                    "finish-step",
                    "message-metadata",
                    "file",
                    "source-url",
                    "data-tokenbus-item",
                    "source-document",
                    "reasoning-file",
                    "data-tokenbus",
                    "data-image-preview",
                )

    def _call(self, part: dict[str, Any]) -> dict[str, Any]:
        return next(each for each in reversed(self.parts) if each.get("toolCallId") == part["toolCallId"])

    @property
    def text(self) -> str:
        return "".join(part["text"] for part in self.parts if part["type"] == "text")


def test_a_text_is_sent_with_its_step_and_its_usage() -> None:
    events = parts(log_of([*text(0, "Hi", " you"), DONE]))
    assert types(events) == [
        "start",
        "start-step",
        "text-start",
        "text-delta",
        "text-end",
        "finish-step",
        "finish",
    ]
    assert events[0] == {"type": "start", "messageId": "r1", "messageMetadata": {"run": "r1", "model": "m"}}
    usage = next(part for part in events if part["type"] == "message-metadata")["messageMetadata"]["usage"]
    assert usage == {"inputTokens": 9, "outputTokens": 5, "reasoningTokens": 2, "cachedInputTokens": 3}
    assert events[-1]["finishReason"] == "stop"


def test_the_signature_comes_with_the_end_of_thinking_once_text_is_visible() -> None:
    log = log_of([*thinking(0, "Hm", signature="sig"), *text(1, "Hi"), DONE])
    events = parts(log)
    end = next(part for part in events if part["type"] == "reasoning-end")
    assert end["providerMetadata"]["tokenbus"]["signature"] == "sig"
    assert types(events).index("reasoning-end") < types(events).index("text-delta")


def test_thinking_that_a_retry_voids_never_gets_its_signature() -> None:
    log = log_of(
        [*thinking(0, "Hm", signature="sig"), n.Failed(BUSY)],
        [*thinking(0, "So", signature="two"), *text(1, "Hi"), DONE],
    )
    void, kept = (part for part in parts(log) if part["type"] == "reasoning-end")
    assert void["providerMetadata"] == {"tokenbus": {"void": True}}
    assert kept["providerMetadata"]["tokenbus"]["signature"] == "two"


def test_version_7_takes_a_void_turn_back() -> None:
    log = log_of(
        [*thinking(0, "Hm"), *call(1, "c1", "f", '{"a"'), n.Failed(BUSY)],
        [*thinking(0, "Ha"), n.Failed(BUSY)],
        [*text(0, "Hi"), DONE],
    )
    events = parts(log, ui=7)
    assert types(events).count("reset-step") == 2
    assert Screen(events).parts[1:] == [{"type": "text", "text": "Hi", "providerMetadata": {}}]


def test_a_call_that_a_retry_voids_is_never_available() -> None:
    log = log_of([*call(0, "c1", "f", "{}"), n.Failed(BUSY)], [*text(0, "Hi"), DONE])
    assert "tool-input-available" not in types(parts(log))
    assert "tool-input-available" not in types(parts(log, ui=7))


def test_a_call_that_a_retry_voids_is_an_error_in_a_step_of_its_own() -> None:
    log = log_of([*call(0, "c1", "f", '{"a'), n.Failed(BUSY)], [*text(0, "Hi"), DONE])
    assert types(parts(log))[1:] == [
        *("start-step", "tool-input-start", "tool-input-delta", "tool-input-error", "finish-step"),
        *("start-step", "text-start", "text-delta", "text-end", "finish-step", "finish"),
    ]


def test_a_call_of_a_clients_tool_is_available_at_the_end_of_its_turn() -> None:
    log = log_of(
        [*text(0, "Look:"), *call(1, "c1", "f", '{"a":', "1}"), n.Done("tool_use", "tool_use", None)], max_tool_depth=0
    )
    events = parts(log)
    assert types(events)[-5:] == [
        *("tool-input-start", "tool-input-delta", "tool-input-available", "finish-step", "finish")
    ]
    available = events[-3]
    assert available["input"] == {"a": 1}
    assert "providerExecuted" not in available
    assert "dynamic" not in available
    assert events[-1]["finishReason"] == "tool-calls"


@pytest.mark.parametrize("ui", [5, 7])
def test_the_input_of_a_call_is_sent_as_it_comes(ui: int) -> None:
    log = log_of(
        [n.ToolCallStart(0, "c1", "f"), n.ToolCallDelta(0, '{"a":')], [n.ToolCallDelta(0, "1}")], max_tool_depth=0
    )
    deltas = [part["inputTextDelta"] for part in parts(log, ui) if part["type"] == "tool-input-delta"]
    assert deltas == ['{"a":', "1}"]


def test_a_call_that_the_bus_runs_and_its_result_are_in_one_step() -> None:
    log = log_of(
        [*call(0, "c1", "weather", "{}"), n.Done("tool_use", "tool_use", None)],
        [ToolReturned(0, "Rain.", False)],
        [*text(0, "Rain."), DONE],
    )
    events = parts(log, bus_tools=frozenset({"weather"}))
    kinds = types(events)
    assert kinds.index("tool-output-available") < kinds.index("finish-step")
    flagged = [part for part in events if part["type"].startswith("tool-") and part["type"] != "tool-input-delta"]
    assert all(part["dynamic"] and part["providerExecuted"] for part in flagged)
    assert kinds.count("start-step") == kinds.count("finish-step") == 2


def test_arguments_that_are_not_json_are_an_input_error() -> None:
    log = log_of([*call(0, "c1", "f", "{no"), n.Done("tool_use", "tool_use", None)], max_tool_depth=0)
    error = next(part for part in parts(log) if part["type"] == "tool-input-error")
    assert error["input"] == "{no"
    assert error["errorText"]


@pytest.mark.parametrize(("ui", "reason"), [(5, "other"), (6, "other"), (7, "interrupted")])
def test_a_cut_is_an_error_after_the_text(ui: int, reason: str) -> None:
    log = log_of([n.BlockStart(0, "text"), n.TextDelta(0, "Hal"), *call(1, "c1", "f", "{}"), CUT])
    assert isinstance(log[-1], Incomplete)
    events = parts(log, ui=ui)
    screen = Screen(events)
    assert (screen.text, screen.finish, screen.error) == ("Hal", reason, "The answer was cut short.")
    assert not screen.open
    assert "tool-input-available" not in types(events)


def test_a_cancel_ends_the_open_text_and_then_aborts() -> None:
    log = log_of([n.BlockStart(0, "text"), n.TextDelta(0, "Hal")], [CancelRequested("stop", None)])
    assert types(parts(log))[-3:] == ["text-end", "finish-step", "abort"]


def test_a_failure_has_a_sentence_without_the_providers_text() -> None:
    secret = msgspec.structs.replace(BUSY, raw='{"account":"acme"}', message="account acme is busy", retryable=False)
    events = parts(log_of([n.Failed(secret)]))
    assert types(events) == ["start", "error", "finish"]
    assert "acme" not in str(events)


@pytest.mark.parametrize("ui", [5, 7])
@given(log=any_log())
def test_any_log_is_encoded_without_a_client_error_and_gives_the_visible_text(ui: int, log: Log) -> None:
    screen = Screen(parts(log, ui=ui))
    assert screen.text == visible_text(log)
    if isinstance(log[-1], TERMINAL):
        assert screen.finish
        assert not screen.open
    complete = {block.tool_id for block in Response.of(log).blocks if block.kind == "tool_call" and not block.cut}
    assert {part["toolCallId"] for part in screen.parts if part.get("state") == "input-available"} <= complete


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_recorded_streams_are_encoded_completely(row: Recording) -> None:
    log = recorded_events(row)
    screen = Screen(parts(log))
    assert screen.text == visible_text(log)


def test_an_answer_that_breaks_ends_with_an_error() -> None:
    stream = encoder()
    log = log_of([n.BlockStart(0, "text"), n.TextDelta(0, "Hal")])
    problem = Problem(status=503, code="gateway_restarting", message="x", kind="overloaded")
    events = streamed(stream, log) + b"".join(stream.broken(problem))
    assert events.endswith(b'"finishReason":"error"}\n\ndata: [DONE]\n\n')
    assert stream.broken(problem) == []


# --- requests ---------------------------------------------------------------------------------------------------------


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"id": "chat", "messages": messages or (USER,), "trigger": "submit-message", "model": "anthropic/m", **more}


def messages(*given: Any) -> list[Message]:
    return translated(SURFACE, gateway_request(body(*given))).generate.messages


def test_a_chat_continues_without_its_client_and_is_streamed() -> None:
    translation = translated(SURFACE, gateway_request(body()))
    assert (translation.stream, translation.on_disconnect, translation.model) == (True, "continue", "anthropic/m")
    assert translation.generate.messages == [Message(role="user", content=[TextPart(text="Hello")])]
    assert translation.generate.max_tool_depth == 0


def test_a_request_without_a_model_takes_the_alias_default() -> None:
    problem = refused(SURFACE, gateway_request(body(model=None)))
    assert (problem.status, problem.code) == (404, "model_not_found")
    assert "'default'" in problem.message
    assert translated(SURFACE, gateway_request(body(model=None), query={"model": "fast"})).generate.provider == "gemini"


def test_options_are_named_as_in_the_ai_sdk() -> None:
    options = {"temperature": 0.5, "topP": 0.9, "maxOutputTokens": 9, "stopSequences": ["x"], "system": "Be brief."}
    more = {"reasoning": "low", "toolChoice": {"type": "tool", "toolName": "f"}, "tools": [{"name": "f"}], "seed": 7}
    found = translated(SURFACE, gateway_request(body(**options, **more)))
    generate = found.generate
    assert (generate.temperature, generate.top_p, generate.max_tokens, generate.stop) == (0.5, 0.9, 9, ["x"])
    assert (generate.system, generate.thinking) == ("Be brief.", Thinking(effort="low"))
    assert (generate.tools, generate.tool_choice) == (
        [Tool(name="f", parameters={"type": "object"})],
        ToolChoice(name="f"),
    )
    assert found.left_out == ["seed"], "the provider has no seed"


def test_the_bus_runs_the_tools_that_are_named_and_the_client_those_that_are_described() -> None:
    allowed = rules(tools=frozenset({"weather"}))
    named = translated(SURFACE, gateway_request(body(tools=["weather"])), allowed)
    assert (named.generate.tools, named.generate.max_tool_depth) == ([Tool(name="weather")], 10)
    assert named.echo["named"] == ["weather"]
    assert refused(SURFACE, gateway_request(body(tools=["shell"])), allowed).param == "tools[0]"
    both = translated(SURFACE, gateway_request(body(tools=["weather", {"name": "f"}])), allowed)
    own = Tool(name="f", parameters={"type": "object"}, kind="client")
    assert both.generate.tools == [Tool(name="weather"), own]
    assert (both.echo["named"], both.echo["client"]) == (["weather"], ["f"])


def test_the_history_of_a_tool_run_comes_back_step_by_step() -> None:
    answer = {
        "id": "a1",
        "role": "assistant",
        "parts": [
            {"type": "step-start"},
            {"type": "reasoning", "text": "Hm", "providerMetadata": {"tokenbus": {"signature": "sig"}}},
            {"type": "text", "text": "I look.", "state": "done"},
            {"type": "tool-f", "toolCallId": "c1", "state": "output-available", "input": {"a": 1}, "output": {"b": 2}},
            {
                "type": "dynamic-tool",
                "toolName": "g",
                "toolCallId": "c2",
                "state": "output-error",
                "input": "{no",
                "errorText": "bad",
                "callProviderMetadata": {"tokenbus": {"opaque": {"api": "gemini", "thought_signature": "t"}}},
            },
            {"type": "tool-h", "toolCallId": "c3", "state": "input-available", "input": {}},
            {"type": "tool-h", "toolCallId": "c4", "state": "output-available", "preliminary": True, "output": {}},
            {"type": "source-url", "sourceId": "s", "url": "https://example.org"},
            {"type": "data-tokenbus", "data": {}},
            {"type": "step-start"},
            {"type": "text", "text": "Two."},
        ],
    }
    assert messages(USER, answer, USER)[1:4] == [
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="Hm", signature="sig"),
                TextPart(text="I look."),
                ToolCallPart(tool_id="c1", tool_name="f", arguments='{"a":1}'),
                ToolCallPart(
                    tool_id="c2",
                    tool_name="g",
                    arguments="{no",
                    opaque={"api": "gemini", "thought_signature": "t"},
                ),
            ],
        ),
        Message(
            role="tool",
            content=[
                ToolResultPart(tool_id="c1", tool_name="f", content='{"b":2}'),
                ToolResultPart(tool_id="c2", tool_name="g", content="bad", is_error=True),
            ],
        ),
        Message(role="assistant", content=[TextPart(text="Two.")]),
    ]


def test_what_a_retry_voided_and_what_was_cut_stay_out_of_the_history() -> None:
    answer = {
        "id": "a1",
        "role": "assistant",
        "parts": [
            {"type": "reasoning", "text": "void", "providerMetadata": {"tokenbus": {"void": True}}},
            {"type": "reasoning", "text": "cut", "providerMetadata": {"tokenbus": {"cut": True}}},
            {
                "type": "tool-f",
                "toolCallId": "c1",
                "state": "output-error",
                "errorText": "x",
                "resultProviderMetadata": {"tokenbus": {"void": True}},
            },
            {"type": "text", "text": "Half", "providerMetadata": {"tokenbus": {"cut": True}}},
        ],
    }
    assert messages(USER, answer, USER)[1] == Message(role="assistant", content=[TextPart(text="Half")])


def test_files_become_images_and_documents() -> None:
    files = [
        {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,aGk="},
        {"type": "file", "mediaType": "text/plain", "url": "data:text/plain,hi%21", "filename": "a.txt"},
        {"type": "file", "mediaType": "image/png", "url": "https://example.org/a.png"},
    ]
    (message,) = messages({"id": "u", "role": "user", "parts": files})
    assert message.content == [
        ImagePart(source=Base64Source(media_type="image/png", data="aGk=")),
        DocumentPart(source=Base64Source(media_type="text/plain", data="aGkh"), title="a.txt"),
        ImagePart(source=UrlSource(url="https://example.org/a.png")),
    ]


def test_an_answer_to_the_clients_tool_continues_the_message_on_its_screen() -> None:
    tool = {"type": "tool-f", "toolCallId": "c1", "state": "output-available", "input": {}, "output": "x"}
    translation = translated(SURFACE, gateway_request(body(USER, {"id": "a1", "role": "assistant", "parts": [tool]})))
    assert translation.echo["message_id"] == "a1"
    note = GatewayNote(surface="ai_sdk_ui", version=1, created=0, model="m", echo=translation.echo)
    (start, *_) = SURFACE.encoder(None, note, "r1").feed(log_of([DONE])[0])
    assert b'"messageId":"a1"' in start


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"id": ""}, "id"),
        ({"messages": []}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "robot", "parts": []}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "parts": [{"type": "audio"}]}]}, "messages[0].parts[0].type"),
        ({"messages": [{"role": "user", "parts": [{"type": "text"}]}]}, "messages[0].parts[0].text"),
        (
            {"messages": [{"role": "user", "parts": [{"type": "file", "mediaType": "a/b", "url": "/x"}]}]},
            "messages[0].parts[0].url",
        ),
        ({"messages": [{"role": "assistant", "parts": [{"type": "custom"}]}]}, "messages[0].parts[0].type"),
        ({"trigger": "resume"}, "trigger"),
        ({"temperature": "hot"}, "temperature"),
        ({"toolChoice": "any"}, "toolChoice"),
        ({"tools": [3]}, "tools[0]"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"tokenbus": {"on_failure": "restart"}}, "tokenbus.on_failure"),
        ({"tokenbus": {"visible": False}}, "tokenbus.visible"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_in_plain_text(change: dict[str, Any], param: str) -> None:
    problem = refused(SURFACE, gateway_request({**body(), **change}))
    assert (problem.status, problem.param) == (400, param)
    answer = SURFACE.refusal(problem)
    assert answer.media_type.startswith("text/plain")
    assert answer.body.decode() == problem.message


def test_a_failure_before_the_first_byte_is_a_sentence() -> None:
    problem = Problem(status=502, code="auth_error", message="auth_error: key of acme", kind="auth")
    assert SURFACE.refusal(problem).body == b"The model's provider refused the request."


def test_the_version_is_5_6_or_7() -> None:
    assert refused(SURFACE, gateway_request(body(), query={"ui": "8"})).param == "ui"
    assert translated(SURFACE, gateway_request(body(), query={"ui": "7"})).echo["ui"] == 7

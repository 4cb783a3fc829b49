"""The surface of Anthropic's Messages API: the request to the bus, and the events for its clients."""

from __future__ import annotations

import re
from base64 import b64encode
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
    answered,
    any_log,
    call,
    log_of,
    recorded_events,
    streamed,
    text,
    thinking,
    visible_text,
)
from tests.services.gateway.rules import gateway_request, noted, refused, rules, translated
from tests.unit.providers.corpus import Recording
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested, ToolReturned
from tokenbus.events.public import TERMINAL, Completed
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    ExtraPart,
    Fallback,
    ImagePart,
    Message,
    OutputSchema,
    TextPart,
    Thinking,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
)
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface, models_answer
from tokenbus_services.gateway.surfaces.anthropic_messages.answer import MessagesStream, whole_message
from tokenbus_services.gateway.surfaces.surface import Echo

SURFACE = AnthropicMessagesSurface()
ECHO = Echo(api="anthropic")
EPHEMERAL = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1d"}
ONE = {"type": "auto", "disable_parallel_tool_use": True}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
_EVENT = re.compile(rb"event: (\w+)\ndata: (\{[^\r\n]*\})\n\n")


def body(*messages: Any, **changes: Any) -> dict[str, Any]:
    conversation = messages or ({"role": "user", "content": "Hi"},)
    return {"model": "anthropic/claude", "max_tokens": 100, "messages": list(conversation), **changes}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def read(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream. Fails unless every byte belongs to one, in exactly the form that all clients read."""
    at, events = 0, []
    while at < len(stream):
        found = _EVENT.match(stream, at)
        assert found, stream[at : at + 200]
        events.append(msgspec.json.decode(found[2]))
        assert events[-1]["type"] == found[1].decode()
        at = found.end()
    return events


def message_in(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Fold a stream as the SDKs do, and check its order. `error` holds the error that ended it."""
    message: dict[str, Any] = {"content": [], "stop_reason": None, "error": None, "over": False}
    open_blocks: set[int] = set()
    for place, event in enumerate(events):
        assert not message["over"], "nothing follows the end"
        kind = event["type"]
        assert (kind == "message_start") == (place == 0) or kind == "error"
        if kind == "content_block_start":
            assert event["index"] == len(message["content"]), "the index is the place in the content"
            message["content"].append({**event["content_block"], "json": ""})
            open_blocks.add(event["index"])
        elif kind == "content_block_delta":
            assert event["index"] in open_blocks
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "citations_delta":
                block["citations"] = [*block.get("citations", []), delta["citation"]]
                continue
            field, piece = {
                "text_delta": ("text", "text"),
                "thinking_delta": ("thinking", "thinking"),
                "signature_delta": ("signature", "signature"),
                "input_json_delta": ("json", "partial_json"),
            }[delta["type"]]
            block[field] = delta[piece] if field == "signature" else block[field] + delta[piece]
        elif kind == "content_block_stop":
            open_blocks.remove(event["index"])
        elif kind == "message_delta":
            assert not open_blocks
            message.update(event["delta"], usage=event["usage"])
        elif kind in ("message_stop", "error"):
            message["over"], message["error"] = True, event.get("error")
    return message


def message_of(log: Log, echo: Echo = ECHO) -> dict[str, Any]:
    return message_in(read(streamed(MessagesStream(noted(echo), "r1"), log)))


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


def text_in(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


# --- requests -----------------------------------------------------------------------------------------------------


def test_a_conversation_with_everything_in_it_is_translated() -> None:
    conversation = body(
        user({"type": "text", "text": "Look", "cache_control": EPHEMERAL}, _image(), _document()),
        assistant(
            {"type": "thinking", "thinking": "hm", "signature": "sig"},
            {"type": "redacted_thinking", "data": "secret"},
            {"type": "text", "text": "One moment", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}, "cache_control": EPHEMERAL},
        ),
        user(
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "rain"}, _image()],
                "is_error": True,
                "cache_control": EPHEMERAL,
            }
        ),
    )
    generate = translated(SURFACE, gateway_request(conversation)).generate
    image = ImagePart(source=Base64Source(media_type="image/png", data="aGk="))
    plain = Base64Source(media_type="text/plain", data=b64encode("ü".encode()).decode())
    assert generate.messages == [
        Message(role="user", content=[TextPart(text="Look", cache=True), image, DocumentPart(source=plain, title="T")]),
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="hm", signature="sig"),
                ThinkingPart(opaque={"redacted": "secret"}),
                TextPart(text="One moment"),
                ToolCallPart(
                    tool_id="t1",
                    tool_name="weather",
                    arguments='{"city":"Bonn"}',
                    opaque={"api": "anthropic", "fields": '{"cache_control":{"type":"ephemeral"}}'},
                ),
            ],
        ),
        Message(
            role="user",
            content=[ToolResultPart(tool_id="t1", content=[TextPart(text="rain"), image], is_error=True, cache=True)],
        ),
    ]


def _image() -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def _document() -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": "ü"}
    return {"type": "document", "source": source, "title": "T", "citations": {"enabled": False}}


def test_the_parameters_are_translated() -> None:
    request = body(
        system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        metadata={"user_id": "u1"},
        cache_control=EPHEMERAL,
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    answer = translated(SURFACE, gateway_request(request, query={"beta": "true"}))
    generate = answer.generate
    assert (answer.stream, answer.model, answer.on_disconnect) == (True, "anthropic/claude", "cancel")
    assert (generate.provider, generate.model, generate.max_tokens) == ("anthropic", "claude", 100)
    assert generate.system == [TextPart(text="Be brief", cache=True)]
    assert (generate.stop, generate.temperature, generate.top_p) == (["END"], 0.5, 0.9)
    assert generate.thinking == Thinking(effort="low")
    assert generate.output_schema == OutputSchema(schema=SCHEMA)
    assert generate.tools == [Tool(name="weather", description="Now.", parameters=SCHEMA)]
    assert generate.tool_choice == ToolChoice(name="weather")
    assert generate.max_tool_depth == 0, "the client runs its own tools"
    assert generate.metadata == {"client": {"user_id": "u1"}}
    assert (generate.top_k, generate.user_id, generate.parallel_tool_calls) == (7, "u1", False)
    kept = {name: request[name] for name in ("cache_control", "service_tier", "context_management")}
    kept["thinking"] = {"display": "summarized"}
    assert generate.extra == kept, "what only this API has goes to it as it came"


def test_an_alias_falls_back_to_its_next_provider() -> None:
    answer = translated(SURFACE, gateway_request(body(model="fast", top_k=3, metadata={"user_id": "u1"})))
    assert answer.generate.fallback == [Fallback(provider="anthropic", model="haiku")]
    assert answer.model == "fast"
    assert answer.generate.top_k == 3, "both providers have it"
    assert answer.generate.user_id is None, "one of the providers has no place for it"


def test_a_cache_mark_may_say_that_it_is_for_an_hour() -> None:
    long = {"type": "ephemeral", "ttl": "1h"}
    request = body(system=[{"type": "text", "text": "Be brief", "cache_control": long}])
    assert translated(SURFACE, gateway_request(request)).generate.system == [TextPart(text="Be brief", cache="1h")]


def test_a_cache_mark_of_a_tool_covers_the_system_text_that_follows_the_tools() -> None:
    request = body(system="Be brief", tools=[{**TOOL, "cache_control": EPHEMERAL}])
    foreign = translated(SURFACE, gateway_request({**request, "model": "openai/m"})).generate
    assert foreign.system == [TextPart(text="Be brief", cache=True)]
    own = translated(SURFACE, gateway_request(request)).generate
    assert own.system == [TextPart(text="Be brief")]
    assert own.tools[0].extra == {"anthropic": {"cache_control": EPHEMERAL}}


@pytest.mark.parametrize(
    ("thinking", "effort", "model", "expected", "extra"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, None, "anthropic/m", Thinking(budget_tokens=2000), None),
        ({"type": "disabled"}, None, "gemini/m", Thinking(enabled=False), None),
        (None, "high", "anthropic/m", None, {"output_config": {"effort": "high"}}),
        (None, "high", "openai/m", Thinking(effort="high"), None),
    ],
)
def test_thinking_and_effort(thinking: Any, effort: Any, model: str, expected: Any, extra: Any) -> None:
    request = body(model=model, thinking=thinking, output_config=effort and {"effort": effort})
    generate = translated(SURFACE, gateway_request(request)).generate
    assert (generate.thinking, generate.extra) == (expected, extra)


def test_tools_of_the_deployment_are_run_by_the_bus() -> None:
    with_headers = gateway_request(body(), headers={"x-tokenbus-tools": "weather", "x-tokenbus-max-tool-depth": "2"})
    answer = translated(SURFACE, with_headers, rules(tools=None))
    assert (answer.generate.tools, answer.generate.max_tool_depth) == ([Tool(name="weather")], 2)
    assert answer.echo["bus_tools"] is True


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("model", {"model": "nobody/knows"}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content[0].type", {"messages": [user({"type": "server_tool_use"})]}),
    ("messages[0].content[0].type", {"messages": [user({"type": "tool_use"})]}),
    ("messages[0].content[0].citations.enabled", {"messages": [user({**_document(), "citations": {"enabled": True}})]}),
    ("messages[0].content[0].context", {"messages": [user({**_document(), "context": "x"})]}),
    ("messages[0].content[0].cache_control.ttl", {"messages": [user({**_image(), "cache_control": LONG})]}),
    ("container", {"container": "c"}),
    ("mcp_servers", {"mcp_servers": []}),
    ("inference_geo", {"inference_geo": "eu"}),
    ("diagnostics", {"diagnostics": {}}),
    ("workspace_id", {"workspace_id": "w"}),
    ("user_profile_id", {"user_profile_id": "w"}),
    ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools[0].allowed_callers", {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}),
    ("tool_choice.type", {"tool_choice": {"type": "some"}}),
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
    ("output_config.effort", {"output_config": {"effort": "endless"}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "grammar"}}}),
    ("metadata.odd", {"metadata": {"odd": 1}}),
    ("tool_choice.disable_parallel_tool_use", {"model": "gemini/m", "tool_choice": ONE}),
    ("tokenbus.on_failure", {"stream": True, "tokenbus": {"on_failure": "restart"}}),
    ("tokenbus.tools", {"tools": [TOOL], "tokenbus": {"tools": ["weather"]}}),
    ("tokenbus.max_tool_depth", {"tokenbus": {"max_tool_depth": 3}}),
    ("betas", {"betas": ["x"]}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "changes"), REFUSED, ids=[f"{param}-{n}" for n, (param, _) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(param: str, changes: dict[str, Any]) -> None:
    problem = refused(SURFACE, gateway_request(body(**{"model": "gemini/m", **changes})), rules(tools=None))
    assert problem.param == param
    answer = SURFACE.refusal(problem)
    error = msgspec.json.decode(answer.body)["error"]
    assert answer.status == (404 if param == "model" else 400)
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")


HINTS: list[tuple[str, dict[str, Any]]] = [
    ("service_tier", {"service_tier": "standard_only"}),
    ("speed", {"speed": "fast"}),
    ("tools.strict", {"tools": [{**TOOL, "strict": True}]}),
    ("tools.defer_loading", {"tools": [{**TOOL, "defer_loading": True}]}),
    ("thinking.display", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ("top_k", {"model": "openai/m", "top_k": 3}),
    ("cache_control", {"cache_control": EPHEMERAL}),
    ("metadata.user_id", {"metadata": {"user_id": "u"}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes"), HINTS, ids=[path for path, _ in HINTS])
def test_a_hint_that_the_provider_has_no_place_for_is_left_out_and_named(path: str, changes: dict[str, Any]) -> None:
    assert translated(SURFACE, gateway_request(body(**{"model": "gemini/m", **changes}))).left_out == [path]


def test_a_provider_of_this_api_gets_what_the_gateway_does_not_know() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    more = {
        "container": "c",
        "service_tier": "standard_only",
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    cited = {**_document(), "citations": {"enabled": True}, "context": "x", "cache_control": LONG}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "cache_control": LONG}
    hour = {"type": "ephemeral", "ttl": "1h"}
    answered = {"type": "tool_result", "tool_use_id": "c", "content": "x", "cache_control": hour}
    system = [{"type": "text", "text": "Be kind.", "cache_control": LONG}]
    request = body(user(cited), assistant(result, called), user(answered), **more, tools=[search, TOOL], system=system)
    asked = gateway_request(request, headers={"anthropic-beta": "a-1, b-2"})
    found = translated(SURFACE, asked)
    generate = found.generate
    assert generate.extra == {
        **{name: more[name] for name in ("container", "service_tier", "context_management")},
        "thinking": {"display": "omitted"},
        "tools": [search],
        "system": system,
        "anthropic_beta": ["a-1", "b-2"],
    }
    assert [tool.name for tool in generate.tools] == [TOOL["name"]]
    (document,), (searched, call), (back,) = (message.content for message in generate.messages)
    assert isinstance(document, ExtraPart)
    assert msgspec.json.decode(document.json) == cited
    assert isinstance(searched, ExtraPart)
    assert msgspec.json.decode(searched.json) == result
    assert isinstance(call, ToolCallPart)
    assert call.opaque == {"api": "anthropic", "fields": '{"cache_control":{"type":"ephemeral","ttl":"1d"}}'}
    assert back == ToolResultPart(tool_id="c", content="x", cache="1h")
    assert found.left_out == []


def test_an_operator_may_have_parameters_dropped_wherever_they_are() -> None:
    names = frozenset({"container", "inference_geo", "tools.allowed_callers", "messages.content.context"})
    callers = {"allowed_callers": ["code_execution_20250825"]}
    request = body(
        user({**_document(), "context": "x"}), model="gemini/m", container="c", inference_geo="eu",
        tools=[{**TOOL, **callers}, {**TOOL, **callers}],
    )  # fmt: skip
    found = translated(SURFACE, gateway_request(request), rules(drop_unsupported=names))
    assert (found.generate.extra, {*found.left_out}) == (None, names)


# --- answers ------------------------------------------------------------------------------------------------------


def test_thinking_text_and_a_call_of_the_client_are_sent_in_order() -> None:
    events = [*thinking(0, "h", "m", signature="sig"), *text(1, "Let ", "me"), *call(2, "t1", "f", '{"a":', "1}")]
    log = log_of([*events, n.Done("tool_use", "tool_use", DONE.usage)], max_tool_depth=0)
    message = message_of(log)
    assert kinds(message) == ["thinking", "text", "tool_use"]
    thought, spoken, called = message["content"]
    assert (thought["thinking"], thought["signature"], spoken["text"]) == ("hm", "sig", "Let me")
    assert (called["id"], called["name"], called["input"], called["json"]) == ("t1", "f", {}, '{"a":1}')
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 9,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    status, whole = answered(whole_message(noted(ECHO), "r1"), log)
    assert status == 200
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "text", "text": "Let me"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    assert (whole["id"], whole["stop_reason"], whole["usage"]) == ("msg_r1", "tool_use", message["usage"])


def test_redacted_thinking_is_marked_as_redacted() -> None:
    hidden = [n.BlockStart(0, "thinking"), n.Opaque(0, "redacted", "data"), n.BlockStop(0)]
    message = message_of(log_of([*hidden, *text(1, "Hi"), DONE]))
    assert message["content"][0] == {"type": "redacted_thinking", "data": "data", "json": ""}


def test_what_another_provider_wants_back_comes_back_as_it_was() -> None:
    begun = n.Start("m", "r", api="openai-responses", provider="openai")
    kept = [n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.Opaque(0, "encrypted", "e"), n.BlockStop(0)]
    message = message_of(log_of([begun, *kept, *text(1, "Hi"), DONE]), Echo(api="openai-responses"))
    block = {name: value for name, value in message["content"][0].items() if name != "json"}
    (stored_message,) = translated(SURFACE, gateway_request(body(assistant(block)))).generate.messages
    origin = {"api": "openai-responses", "provider": "openai"}
    assert stored_message.content == [ThinkingPart(text="hm", opaque={"encrypted": "e", **origin})]


def test_a_run_of_several_turns_is_one_message_without_the_calls_that_the_bus_ran() -> None:
    first = [*text(0, "Let me look. "), *call(1, "t1", "f", "{}"), n.Done("tool_use")]
    log = log_of(first, [ToolReturned(1, "rain", False)], [*text(0, "It rains."), DONE])
    message = message_of(log, Echo(api="anthropic", bus_tools=True))
    assert kinds(message) == ["text", "text"]
    assert (text_in(message), message["stop_reason"]) == ("Let me look. It rains.", "end_turn")
    _, whole = answered(whole_message(noted(Echo(api="anthropic", bus_tools=True)), "r1"), log)
    assert [block["type"] for block in whole["content"]] == ["text", "text"]


def test_a_client_gets_nothing_of_an_attempt_that_failed_after_thinking_and_a_call() -> None:
    failing = [*thinking(0, "wrong"), *call(1, "t1", "f", "{}"), n.Failed(BUSY)]
    message = message_of(log_of(failing, [*thinking(0, "right"), *text(1, "Hi"), DONE]))
    assert [block.get("thinking") for block in message["content"]] == ["right", None]
    assert message["over"]


@pytest.mark.parametrize(
    ("end", "kind", "code"),
    [
        ([n.Cut("the stream ended")], "api_error", "stream_cut"),
        ([n.Failed(BUSY)], "overloaded_error", "overloaded_error"),
        ([CancelRequested("enough")], "api_error", "cancelled"),
    ],
)
def test_a_run_that_does_not_complete_ends_in_an_error(end: list[Any], kind: str, code: str) -> None:
    log = log_of([*text(0, "Hal")[:-1]], end)
    message = message_of(log)
    assert (message["error"]["type"], message["error"]["code"]) == (kind, code)
    assert message["error"]["message"].startswith(code)
    status, whole = answered(whole_message(noted(ECHO), "r1"), log)
    assert (status >= 400, whole["error"]) == (True, message["error"])


def test_a_stop_string_and_the_bus_limit_of_tool_turns_have_their_reasons() -> None:
    assert message_of(log_of([*text(0, "x"), n.Done("stop", stop_string="END")]))["stop_sequence"] == "END"
    left = log_of([*call(0, "t1", "f", "{}"), n.Done("tool_use")], max_tool_depth=0)
    message = message_of(left, Echo(api="anthropic", bus_tools=True))
    assert (kinds(message), message["stop_reason"]) == ([], "pause_turn")


def test_an_answer_that_the_gateway_cannot_continue_ends_in_an_error() -> None:
    problem = Problem(
        status=503, code="gateway_restarting", message="later", kind="overloaded", run="r1", request="mine"
    )
    (event,) = read(b"".join(MessagesStream(noted(ECHO), "r1").broken(problem)))
    assert (event["error"]["type"], event["request_id"]) == ("overloaded_error", "mine")


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_every_recorded_stream_is_encoded_completely(row: Recording) -> None:
    log = recorded_events(row)
    message = message_of(log, Echo(api=row.api_name))
    if isinstance(log[-1], TERMINAL):
        assert message["over"]
        assert bool(message["error"]) == (not isinstance(log[-1], Completed))
    assert text_in(message) == visible_text(log)
    if isinstance(log[-1], Completed):
        _, whole = answered(whole_message(noted(Echo(api=row.api_name)), "r1"), log)
        assert text_in(whole) == visible_text(log)
        assert (whole["usage"], whole["stop_reason"]) == (message["usage"], message["stop_reason"])
        thought = "".join(block.get("thinking", "") for block in message["content"])
        assert thought == Response.of(log).thinking


@given(any_log())
def test_any_log_gives_a_valid_message_with_the_visible_text(log: Log) -> None:
    message = message_of(log)
    assert message["over"] == isinstance(log[-1], TERMINAL)
    assert text_in(message) == visible_text(log)


@given(any_log(policies=["restart", "continue", "fail"]))
def test_any_whole_answer_has_the_visible_text_or_is_an_error(log: Log) -> None:
    if isinstance(log[-1], TERMINAL):
        status, whole = answered(whole_message(noted(ECHO), "r1"), log)
        if isinstance(log[-1], Completed):
            assert text_in(whole) == visible_text(log)
        else:
            assert (status >= 400, whole["type"]) == (True, "error")


def test_models_are_listed_in_the_form_of_the_api() -> None:
    page = msgspec.json.decode(models_answer(["a", "b"]).body)
    assert [model["id"] for model in page["data"]] == ["a", "b"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
    assert msgspec.json.decode(models_answer([]).body)["first_id"] is None

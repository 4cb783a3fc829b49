"""Requests of the Responses API: what each parameter becomes, and which are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.services.gateway.rules import gateway_request, refused, rules, translated
from tests.services.gateway.surfaces.test_openai_responses_stream import note, read_back, stream
from tests.services.gateway.surfaces.test_settling import thinking
from tests.unit.core.run.script import Story, call
from tokenbus.events import normalized as n
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    ExtraPart,
    FileSource,
    Generate,
    ImagePart,
    Message,
    OutputSchema,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.gateway.surfaces.openai_responses.response_object import MAX_ECHO_BYTES
from tokenbus_services.gateway.surfaces.surface import ONLY_JSON

SURFACE = OpenAIResponsesSurface()
Json = dict[str, Any]


def of(**body: Any) -> Translated:
    return translated(SURFACE, gateway_request({"model": "responses/gpt-5", "input": "Hi", **body}))


def generated(**body: Any) -> Generate:
    return of(**body).generate


def problem(**body: Any) -> Problem:
    return refused(SURFACE, gateway_request({"model": "responses/gpt-5", "input": "Hi", **body}))


def repeated(**body: Any) -> Json:
    request = of(**body)
    note = GatewayNote(surface=SURFACE.name, version=1, created=1, model=request.model, echo=request.echo)
    return read_back(stream(Story().events, note))[0]["response"]


def test_a_text_is_the_users_message() -> None:
    request = of(instructions="be brief", max_output_tokens=9, temperature=0.5, top_p=0.9, stream=True)
    generate = request.generate
    assert generate.messages == [Message(role="user", content="Hi")]
    assert (generate.provider, generate.model, generate.system) == ("responses", "gpt-5", "be brief")
    assert (generate.max_tokens, generate.temperature, generate.top_p) == (9, 0.5, 0.9)
    assert (request.stream, request.background, request.on_disconnect) == (True, False, "cancel")
    assert generate.max_tool_depth == 0


def test_items_of_the_model_become_one_message_and_outputs_another() -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "w", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "v", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    assert generated(input=items).messages == [
        Message(role="system", content="rules"),
        Message(role="user", content="weather?"),
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="hm"),
                TextPart(text="Let me see."),
                ToolCallPart(tool_id="a", tool_name="w", arguments="{}"),
                ToolCallPart(tool_id="b", tool_name="v", arguments="{}"),
            ],
        ),
        Message(
            role="tool",
            content=[
                ToolResultPart(tool_id="a", content="sun", tool_name="w"),
                ToolResultPart(tool_id="b", content=[TextPart(text="rain")], tool_name="v"),
            ],
        ),
        Message(role="user", content="thanks"),
    ]


def test_images_and_files_are_parts() -> None:
    content = [
        {"type": "input_image", "image_url": "https://x/y.png", "detail": "auto"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,BBBB", "filename": "a.pdf"},
        {"type": "input_file", "file_url": "https://x/a.pdf"},
        {"type": "input_image", "file_id": "file-1"},
    ]
    assert generated(input=[{"role": "user", "content": content}]).messages[0].content == [
        ImagePart(source=UrlSource(url="https://x/y.png")),
        ImagePart(source=Base64Source(media_type="image/png", data="AAAA")),
        DocumentPart(source=Base64Source(media_type="application/pdf", data="BBBB"), title="a.pdf"),
        DocumentPart(source=UrlSource(url="https://x/a.pdf")),
        ImagePart(source=FileSource(file_id="file-1")),
    ]


def test_the_messages_of_a_response_can_be_sent_back_unchanged() -> None:
    story = Story(max_tool_depth=0)
    signed = [*thinking(0, "hm")]
    signed.insert(2, n.Opaque(0, "signature", "sig"))
    story.provider(n.Start("m", "id", api="gemini", provider="p"), *signed)
    story.provider(n.ToolCallStart(1, "a", "f"), n.Opaque(1, "thought_signature", "ts"), n.ToolCallDone(1))
    story.provider(n.Done("tool_use"))
    output = read_back(stream(story.events))[-1]["response"]["output"]
    message = generated(input=[{"role": "user", "content": "x"}, *output]).messages[1]
    reasoning, called = message.content
    assert isinstance(reasoning, ThinkingPart)
    assert isinstance(called, ToolCallPart)
    assert (reasoning.text, reasoning.signature) == ("hm", "sig")
    assert called.opaque == {"api": "gemini", "provider": "p", "thought_signature": "ts"}


def test_another_servers_encrypted_reasoning_is_passed_over() -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB"}
    parts = generated(input=[item, {"role": "user", "content": "x"}]).messages[0].content
    assert parts == [ThinkingPart()]


def test_tools_are_the_clients_to_run() -> None:
    tool = {"type": "function", "name": "w", "description": "d", "parameters": {"type": "object"}, "strict": True}
    generate = generated(tools=[tool], tool_choice="required")
    assert [(t.name, t.description, t.parameters) for t in generate.tools] == [("w", "d", {"type": "object"})]
    assert generate.tool_choice == "any"
    assert generate.max_tool_depth == 0
    assert generated(tools=[tool], tool_choice={"type": "function", "name": "w"}).tool_choice == ToolChoice(name="w")
    assert repeated(tools=[tool])["tools"] == [tool]


def test_tools_of_the_deployment_are_run_by_the_bus() -> None:
    request = translated(
        SURFACE,
        gateway_request({"model": "responses/m", "input": "Hi", "tokenbus": {"tools": ["look"], "show_tools": True}}),
        rules(tools=None),
    )
    assert [tool.name for tool in request.generate.tools] == ["look"]
    assert request.generate.max_tool_depth > 0
    assert (request.echo["bus_tools"], request.echo["show_tools"]) == (True, True)


@pytest.mark.parametrize(
    ("reasoning", "means"),
    [
        ({"effort": "low"}, Thinking(effort="low")),
        ({"effort": "none"}, Thinking(enabled=False)),
        ({"summary": "auto"}, Thinking()),
        ({"effort": None, "summary": None}, None),
    ],
)
def test_reasoning_is_thinking(reasoning: Json, means: Thinking | None) -> None:
    assert generated(reasoning=reasoning).thinking == means


def test_a_json_schema_is_the_output_schema_and_verbosity_is_sent_to_the_provider() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    generate = generated(text={"format": form, "verbosity": "low"})
    assert generate.output_schema == OutputSchema(name="n", schema={"type": "object"}, strict=True)
    assert generate.extra == {"text": {"verbosity": "low"}}
    assert repeated(text={"format": form})["text"]["format"] == form | {"description": None}


def test_openais_own_parameters_go_to_openai() -> None:
    generate = generated(user="u", safety_identifier="s", prompt_cache_key="k", service_tier="flex")
    assert generate.extra == {"prompt_cache_key": "k", "service_tier": "flex"}
    assert generate.user_id == "s"
    assert generated(user="u", parallel_tool_calls=False).user_id == "u"
    assert generated(parallel_tool_calls=False).parallel_tool_calls is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("user", {"user": "x"}),
        ("safety_identifier", {"safety_identifier": "x"}),
        ("prompt_cache_key", {"prompt_cache_key": "x"}),
        ("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
        ("service_tier", {"service_tier": "flex"}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("tools.strict", {"tools": [{"type": "function", "name": "f", "strict": True}]}),
        ("tools.defer_loading", {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}),
        ("input.content.detail",
         {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]}),
    ],
)  # fmt: skip
def test_a_hint_that_the_provider_has_no_place_for_is_left_out_and_named(path: str, body: Json) -> None:
    found = of(**{"model": "gemini/m", **body})
    assert (found.generate.extra, found.left_out) == (None, [path])


def test_a_json_object_without_a_schema_is_asked_for_in_words_where_there_is_no_mode_for_it() -> None:
    form = {"format": {"type": "json_object"}}
    assert generated(text=form).json_object
    assert generated(model="anthropic/m", text=form, instructions="Be kind.").system == f"Be kind.\n\n{ONLY_JSON}"


def test_a_provider_of_this_api_gets_what_the_gateway_does_not_know() -> None:
    more: Json = {
        "context_management": [{"type": "compaction"}],
        "max_tool_calls": 3,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "unheard_of": {"a": [1]},
        "tool_choice": {"type": "web_search"},
        "tools": [{"type": "web_search"}],
    }
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}}
    heard = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]}
    generate = generated(input=[searched, heard], reasoning={"effort": "low", "odd": 1}, **more)
    assert generate.extra == {**more, "reasoning": {"odd": 1}}
    parts = [part for message in generate.messages for part in message.content]
    assert [msgspec.json.decode(part.json) for part in parts if isinstance(part, ExtraPart)] == [searched, heard]


def test_a_tool_in_a_namespace_has_both_names_on_the_bus_and_its_own_for_the_client() -> None:
    space = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]}
    called = {"type": "function_call", "call_id": "c", "namespace": "crm", "name": "find", "arguments": "{}"}
    answered = {"type": "function_call_output", "call_id": "c", "output": "x"}
    request = of(model="gemini/m", tools=[space], input=[{"role": "user", "content": "x"}, called, answered])
    assert [tool.name for tool in request.generate.tools] == ["crm__find"]
    call_part = request.generate.messages[1].content[0]
    assert isinstance(call_part, ToolCallPart)
    assert call_part.tool_name == "crm__find"
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "crm__find", "{}"), n.Done("tool_use"))
    made = GatewayNote(surface=SURFACE.name, version=1, created=1, model="m", echo=request.echo)
    response = read_back(stream(story.events, made))[-1]["response"]
    (item,) = response["output"]
    assert (item["namespace"], item["name"]) == ("crm", "find")
    assert response["tools"] == [space]


def test_values_that_change_nothing_pass() -> None:
    body = {
        "truncation": "disabled", "top_logprobs": 0, "store": True, "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False}, "service_tier": "auto", "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "metadata": {}, "background": False,
    }  # fmt: skip
    request = translated(SURFACE, gateway_request({"model": "anthropic/m", "input": "Hi", **body}))
    assert request.generate.extra is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": []}, "context_management"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "w", "color": 1}]}, "tools[0].color"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "JVBERi"}]}]},
         "input[0].content[0].file_data"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"temperature": "hot"}, "temperature"),
        ({"background": True, "store": False}, "store"),
        ({"stream": True, "tokenbus": {"on_failure": "restart"}}, "tokenbus.on_failure"),
        ({"background": True, "tokenbus": {"on_failure": "restart"}}, "tokenbus.on_failure"),
        ({"tokenbus": {"show_tools": 1}}, "tokenbus.show_tools"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: Json, param: str) -> None:
    found = problem(**{"model": "gemini/m", **body})
    assert found.param == param
    assert found.status == 400


def test_a_refusal_has_openais_shape() -> None:
    answer = SURFACE.refusal(problem(conversation="c"))
    error = msgspec.json.decode(answer.body)["error"]
    assert answer.status == 400
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error", "conversation", "unsupported_parameter",
    )  # fmt: skip


def test_the_response_repeats_the_request() -> None:
    echoed = repeated(temperature=0.5, metadata={"k": "v"}, instructions="x", max_output_tokens=7, user="u")
    assert (echoed["temperature"], echoed["metadata"], echoed["instructions"]) == (0.5, {"k": "v"}, "x")
    assert (echoed["max_output_tokens"], echoed["user"], echoed["top_p"]) == (7, "u", 1.0)


def test_large_settings_are_not_kept_with_every_run() -> None:
    request = of(instructions="x" * MAX_ECHO_BYTES, temperature=0.5)
    assert len(msgspec.json.encode(request.echo)) < MAX_ECHO_BYTES
    assert repeated(instructions="x" * MAX_ECHO_BYTES, temperature=0.5)["temperature"] == 0.5


def test_metadata_of_the_client_is_kept_apart() -> None:
    assert generated(metadata={"tenant": "other"}).metadata == {"client": {"tenant": "other"}}


def test_a_background_response_continues_without_its_client() -> None:
    request = of(background=True, store=True)
    assert (request.background, request.on_disconnect) == (True, "continue")


def test_a_stream_continues_after_the_number_asked_for() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "f", "{}"), n.Done("tool_use"))
    whole = stream(story.events)
    encoder = SURFACE.encoder(GatewayRequest(body=b"", headers={}, query={"starting_after": "3"}), note(), "r1")
    assert [piece for event in story.events for piece in encoder.feed(event)] == whole[4:]


def test_an_operator_may_have_hosted_tools_left_out_and_the_response_shows_the_others() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    fields = {"model": "anthropic/m", "input": "x", "tools": tools, "client_metadata": {"session": "s"}}
    request = gateway_request(fields)
    found = translated(SURFACE, request, rules(drop_unsupported=frozenset({"tools.type"})))
    assert [tool.name for tool in found.generate.tools or []] == ["f"]
    assert sorted(found.left_out) == ["client_metadata", "tools.type"]
    assert refused(SURFACE, request).param == "tools[1].type"

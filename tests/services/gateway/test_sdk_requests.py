"""An SDK in front of a provider of its own API: what the provider receives is what the client sent.

The SDKs build the requests, with any values of the types of their parameters.
"""

from __future__ import annotations

import os
import types as python_types
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

import anthropic
import httpx2
import msgspec
import openai
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from google import genai
from google.genai import errors, types
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from typing_extensions import get_type_hints, is_typeddict

from tests.services.gateway.conformance import SURFACES
from tests.services.gateway.rules import gateway_request, rules
from tests.services.gateway.surfaces.test_hostile_requests import CHAT, GEMINI, MESSAGES, RESPONSES
from tokenbus.errors import RequestInvalid
from tokenbus.providers import registry
from tokenbus.providers.api import Quirks
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.surfaces.gemini.request import camel

Json = dict[str, Any]
PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(1, 99),
    float: st.sampled_from([0.5, 1]),
    type(None): st.none(),
    None: st.none(),
    bytes: st.just(b"\xff\xfb"),
    Any: st.sampled_from(["v", {"k": [1]}]),
    object: st.sampled_from(["v", 1, {"k": [1]}]),
}
NAMES = st.sampled_from(["f", "weather", "a-b_1"])
TEXTS = st.sampled_from(["Hello.", "é\u2028", "{}", "x"])
VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "data": st.just("AAAA"), "file_data": st.just("AAAA"),
    "url": st.just("https://a.example/b.png"), "image_url": st.just("https://a.example/b.png"),
    "name": NAMES, "id": st.sampled_from(["a1", "b2"]),
}  # fmt: skip


def value(draw: st.DrawFn, hint: Any, name: str, depth: int) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is str:
        return draw(VALUES.get(name, TEXTS))
    if is_typeddict(hint):
        return typed(draw, hint, depth)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return draw(st.sampled_from([each for each in hint if not each.name.endswith("UNSPECIFIED")])).value
    if origin is Literal:
        return draw(st.sampled_from(args))
    if origin in (Union, python_types.UnionType):
        known = [each for each in args if _is_known(each)]
        choices = [each for each in known if not (depth <= 0 and _is_deep(each))]
        return value(draw, draw(st.sampled_from(choices or known)), name, depth)
    if origin is not None and not isinstance(origin, type):  # Annotated
        return value(draw, args[0], name, depth)
    if origin and issubclass(origin, Mapping):
        return {"k": "v"}
    if origin and issubclass(origin, Iterable):
        return [value(draw, args[0], name, depth - 1) for _ in range(draw(st.integers(1, 2)))]
    return draw(PLAIN[hint])


def _is_known(hint: Any) -> bool:
    """Not an object of the SDK, which it writes as a client would write its fields, nor a function."""
    if get_origin(hint) is Callable:
        return False
    if isinstance(hint, type) and issubclass(hint, Enum):
        return True
    if hint is str or hint in PLAIN or is_typeddict(hint) or get_origin(hint) is Literal:
        return True
    return any(map(_is_known, get_args(hint)))


def _is_deep(hint: Any) -> bool:
    return is_typeddict(hint) or isinstance(get_origin(hint), type)


def typed(draw: st.DrawFn, kind: Any, depth: int) -> Json:
    found: Json = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        needed = get_origin(hint) is Required or (kind.__total__ and get_origin(hint) is not NotRequired)
        if needed or (depth > 0 and draw(st.integers(0, 3)) == 0):
            found[name] = value(draw, hint, name, depth - 1)
    return found


@st.composite
def params(draw: st.DrawFn, kind: Any) -> Json:
    return typed(draw, kind, 5)


def written_by(create: Callable[..., Any], asked: list[bytes], sent: Json) -> Json:
    """The body that an SDK writes for these parameters."""
    asked.clear()
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError, errors.APIError, ValueError)):
        create(**sent)
    assume(asked)  # an SDK refuses some values by itself
    return msgspec.json.decode(asked[0])


NO_REQUESTS = (
    "this field is required",  # of a JSON schema, by OpenAI too, though its types say otherwise
    "a tool call is required, but the request has no tools",
    "cannot be given with thinkingLevel",
)
"""Why requests are refused, as the providers refuse them."""


def received(surface: str, api: str, body: Json) -> Json:
    """The body that a provider of the same API gets. Raises Refusal, RequestInvalid."""
    path = {"model": "gemini/m", "method": "generateContent"} if surface == "Gemini" else {}
    generate = SURFACES[surface][0].translate(gateway_request(body, path=path), rules()).generate
    return msgspec.json.decode(registry.get(api).build(generate, [], Quirks()).call.body)


# --- what differs, by name ------------------------------------------------------------------------------------------


def without_nothing(value: Any) -> Any:
    """A field that is null, or an empty object or list, is absent. A cache lives for five minutes by itself."""
    if isinstance(value, dict):
        kept: Json = {name: without_nothing(each) for name, each in value.items()}
        return {
            name: each for name, each in kept.items() if each not in (None, {}, []) and (name, each) != ("ttl", "5m")
        }
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


def as_parts(content: Any) -> Any:
    """A text is a list of one part. What the model refused with is its text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    refused = [part.get("type") == "refusal" for part in content or []]
    return [
        {"type": "text", "text": part["refusal"]} if is_refusal else part
        for part, is_refusal in zip(content or [], refused, strict=True)
    ]


def joined(parts: Any, seam: str) -> Any:
    """Texts of one message are one text."""
    if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
        return seam.join(part["text"] for part in parts)
    return parts


def _ordered(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _not_strict(tool: Json) -> Json:
    usual: list[tuple[str, Any]] = [("strict", False), ("defer_loading", False), ("format", {"type": "text"})]
    usual += [("type", "custom")] if "input_schema" in tool else []
    kept = {name: each for name, each in tool.items() if (name, each) not in usual}
    inner = next((kind for kind in ("function", "custom") if isinstance(kept.get(kind), dict)), None)
    return {**kept, inner: _not_strict(kept[inner])} if inner else kept


def sorted_tools(tools: Iterable[Json]) -> list[Json]:
    """Those that the bus does not know come last. A function without parameters takes an object; one that does not say
    whether it is strict is not.
    """
    plain: list[Json] = []
    for tool in map(_not_strict, tools):
        if "function" in tool:
            plain.append({**tool, "function": {"parameters": {"type": "object"}, **tool["function"]}})
        elif tool["type"] == "function":
            plain.append({"parameters": {"type": "object"}, **tool})
        else:
            plain.append(tool)
    return sorted(plain, key=_ordered)


def chosen(body: Json) -> None:
    """Of a choice of one tool, the name matters: it is of the kind that the tool has."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and (kind := choice.get("type")) in ("function", "custom"):
        body["tool_choice"] = choice.get(kind, choice)["name"]


def of_messages(body: Json) -> Json:
    body = without_nothing(body)
    body["tools"] = sorted(map(_not_strict, body.get("tools", [])), key=_ordered)
    body.pop("model")
    body.pop("stream", None)
    if "system" in body:
        body["system"] = as_parts(body["system"])
    merged: list[Json] = []
    for message in body["messages"]:
        content = [
            {**block, "content": as_parts(block["content"])} if block.get("type") == "tool_result" else block
            for block in as_parts(message["content"])
        ]
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] += content
        else:
            merged.append({"role": message["role"], "content": content})
    body["messages"] = merged
    body["stop_sequences"] = list(dict.fromkeys(body.get("stop_sequences", ())))
    choice = body.get("tool_choice", {})
    if choice.get("disable_parallel_tool_use") is False:
        del choice["disable_parallel_tool_use"]
    if not body.get("tools"):
        body.pop("tool_choice", None)
    return body


def of_chat(body: Json) -> Json:
    body = without_nothing(body)
    body["tools"] = sorted_tools(body.get("tools", []))
    for name in ("model", "stream", "stream_options", "metadata"):  # metadata is the run's
        body.pop(name, None)
    if "max_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_tokens")
    messages: list[Json] = []
    for message in body["messages"]:
        role = "system" if message["role"] == "developer" else message["role"]
        parts = message.get("content")
        if role != "user":  # its texts are one, without marks of the cache between them
            parts = joined(as_parts(parts), "" if role == "assistant" else "\n\n") if parts else parts
        elif isinstance(parts, list) and len(parts) == 1 and set(parts[0]) == {"type", "text"}:
            parts = parts[0]["text"]
        messages.append({**message, "role": role, "content": parts})
    body["messages"] = messages
    stop = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
    body["stop"] = list(dict.fromkeys(stop))
    if body.get("response_format") == {"type": "text"}:
        del body["response_format"]
    if body.get("n") == 1:
        del body["n"]
    if body.get("parallel_tool_calls") or not body.get("tools"):
        body.pop("parallel_tool_calls", None)
    if not body.get("tools") or body.get("tool_choice") == "auto":
        body.pop("tool_choice", None)
    chosen(body)
    return without_nothing(body)


def of_responses(body: Json) -> Json:
    body = without_nothing(body)
    body["tools"] = sorted_tools(body.get("tools", []))
    for name in ("model", "stream", "store", "metadata"):  # the bus keeps the conversation, and metadata is the run's
        body.pop(name, None)
    if "user" in body:
        body.setdefault("safety_identifier", body["user"])
        del body["user"]
    for name in ("summary", "generate_summary"):  # the bus asks for the thinking
        body.get("reasoning", {}).pop(name, None)
    include = [name for name in body.pop("include", []) if name != "reasoning.encrypted_content"]
    body["include"] = sorted(set(include))
    if body.get("text", {}).get("format") == {"type": "text"}:
        del body["text"]["format"]
    if body.get("parallel_tool_calls") or not body.get("tools"):
        body.pop("parallel_tool_calls", None)
    if not body.get("tools") or body.get("tool_choice") == "auto":
        body.pop("tool_choice", None)
    chosen(body)
    return without_nothing(body)


def in_camel_case(value: Any) -> Any:
    """The SDK mixes both cases, and both alphabets of base64."""
    if isinstance(value, dict):
        named = {camel(name): in_camel_case(each) for name, each in value.items()}
        return {name: each.replace("-", "+").replace("_", "/") if name == "data" else each
                for name, each in named.items() if each != "skip_thought_signature_validator"}  # fmt: skip
    return [in_camel_case(each) for each in value] if isinstance(value, list) else value


def of_gemini(body: Json) -> Json:
    """A call of a model that signs its thoughts says that it has no signature."""
    body = without_nothing(in_camel_case(body))
    config = body.get("generationConfig", {})
    config.get("thinkingConfig", {}).pop("includeThoughts", None)  # the bus asks for the thinking
    if "stopSequences" in config:
        config["stopSequences"] = list(dict.fromkeys(config["stopSequences"]))
    for name in ("topP", "temperature", "topK"):  # 1.0 is 1
        if name in config:
            config[name] = float(config[name])
    contents: list[Json] = []
    for content in body["contents"]:
        if contents and contents[-1].get("role") == content.get("role"):
            contents[-1]["parts"] += content["parts"]
        else:
            contents.append(content)
    tools = sorted(filter(None, body.get("tools", [])), key=_ordered)
    return without_nothing({**body, "contents": contents, "tools": tools})


# --- requests that a provider would take ----------------------------------------------------------------------------


def for_messages(sent: Json) -> Json:
    sent = {**sent, "model": "anthropic/m", "max_tokens": 4096}
    sent.pop("stream", None)
    messages: list[Json] = []
    for message in sent["messages"]:
        own = ("thinking", "redacted_thinking") if message["role"] == "assistant" else ()
        foreign = {"thinking", "redacted_thinking", "tool_use", "tool_result"} - set(own)
        if message["role"] != "system":  # which goes to the front
            content = [block for block in as_parts(message["content"]) or [] if block["type"] not in foreign]
            messages.append({**message, "content": [*content, {"type": "text", "text": "."}]})
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain.", "toolset_name": "sky"}
    asks = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
    ends = [{"role": "user", "content": [result]}, {"role": "assistant", "content": "So."}]  # whose thinking is over
    return {**sent, "messages": [*asks, *ends, *messages, {"role": "user", "content": "And now?"}]}


def for_chat(sent: Json) -> Json:
    never = ("functions", "function_call", "n", "stream", "stream_options", "max_tokens")
    sent = {**{name: each for name, each in sent.items() if name not in never}, "model": "openai/m"}
    messages: list[Json] = []
    for message in sent["messages"]:
        if message["role"] in ("system", "developer", "user", "assistant") and message.get("content"):
            content = message["content"]
            if isinstance(content, list):
                for part in content:
                    if "file" in part:
                        part["file"] = {"file_id": "f1"}
            messages.append({key: message[key] for key in ("role", "content", "name") if key in message})
    call = {"type": "function", "id": "t1", "function": {"name": "weather", "arguments": "{}"}}
    asks = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    return {**sent, "messages": [*asks, {"role": "tool", "tool_call_id": "t1", "content": "Rain."}, *messages]}


def for_responses(sent: Json) -> Json:
    never = ("conversation", "prompt", "previous_response_id", "background", "stream", "stream_options", "input")
    sent = {**{name: each for name, each in sent.items() if name not in never}, "model": "responses/m"}
    call = {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "t1", "output": "Rain."}
    return {**sent, "input": [{"role": "user", "content": "Hi"}, call, output]}


DRAWN = (
    *("temperature", "top_p", "max_output_tokens", "stop_sequences", "presence_penalty", "frequency_penalty", "seed"),
    *("safety_settings", "tools", "tool_config", "thinking_config", "media_resolution", "response_logprobs"),
    *("speech_config", "service_tier", "image_config", "response_modalities"),
)
"""The others are for the SDK itself, or for Vertex AI alone."""


@st.composite
def google_params(draw: st.DrawFn) -> Json:
    """A configuration, and the parts of one message."""
    hints = get_type_hints(types.GenerateContentConfigDict, include_extras=True)
    names = draw(st.sets(st.sampled_from(DRAWN), max_size=5))
    config = {name: value(draw, hints[name], name, 3) for name in sorted(names)}
    file = draw(st.sampled_from([{"inline_data": {"data": b"\xff\xfb", "mime_type": "image/png"}}, {"text": "x"}]))
    if draw(st.booleans()):
        file = {**file, "media_resolution": {"level": "MEDIA_RESOLUTION_LOW"}}
    return {"config": config, "part": file}


def for_gemini(sent: Json) -> Json:
    config = without_nothing(sent["config"])
    for tool in config.get("tools", ()):
        if "function_declarations" in tool:
            tool["function_declarations"] = [{"name": "f", "parameters_json_schema": {"type": "object"}}]
    call = {"role": "model", "parts": [{"function_call": {"name": "weather", "args": {"city": "Rome"}}}]}
    answer = {"role": "user", "parts": [{"function_response": {"name": "weather", "response": {"output": "Rain."}}}]}
    asks = {"role": "user", "parts": [{"text": "Hi"}, sent["part"]]}
    return {"model": "gemini/m", "contents": [asks, call, answer], "config": config}


Made = Callable[[list[bytes]], Callable[..., Any]]


def _http(asked: list[bytes]) -> httpx2.Client:
    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.content)
        return httpx2.Response(400, json={})

    return httpx2.Client(transport=httpx2.MockTransport(answer))


def _openai(asked: list[bytes]) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url="http://a.example/v1", max_retries=0, http_client=_http(asked))


def _anthropic(asked: list[bytes]) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="k", base_url="http://a.example", max_retries=0, http_client=_http(asked))


def _google(asked: list[bytes]) -> Callable[..., Any]:
    options = types.HttpOptions(base_url="http://a.example", client_args={"transport": _http(asked)._transport})
    api = genai.Client(api_key="k", http_options=options)
    return lambda **sent: (api, api.models.generate_content(**sent))


class Case(msgspec.Struct, frozen=True):
    api: str
    kind: Any
    create: Made
    sensible: Callable[[Json], Json]
    plain: Callable[[Json], Json]


CASES = {
    "Messages": Case(
        "anthropic",
        MessageCreateParamsNonStreaming,
        lambda asked: _anthropic(asked).messages.create,
        for_messages,
        of_messages,
    ),
    "Gemini": Case("gemini", None, _google, for_gemini, of_gemini),
    "Chat": Case(
        "openai-chat",
        CompletionCreateParamsNonStreaming,
        lambda asked: _openai(asked).chat.completions.create,
        for_chat,
        of_chat,
    ),
    "Responses": Case(
        "openai-responses",
        ResponseCreateParamsNonStreaming,
        lambda asked: _openai(asked).responses.create,
        for_responses,
        of_responses,
    ),
}


@pytest.mark.parametrize("surface", CASES)
def test_a_provider_of_the_clients_api_gets_what_the_sdk_wrote_but_for_named_differences(surface: str) -> None:
    case = CASES[surface]
    asked: list[bytes] = []
    create = case.create(asked)
    taken = 0

    @settings(
        max_examples=int(os.environ.get("SDK_EXAMPLES", "40")),
        derandomize=True,
        deadline=None,
        phases=(Phase.generate,),
    )  # to shrink these takes minutes
    @given(params(case.kind) if case.kind else google_params())
    def same(drawn: Json) -> None:
        nonlocal taken
        sent = written_by(create, asked, case.sensible(drawn))
        try:
            got = received(surface, case.api, sent)
        except (Refusal, RequestInvalid) as e:
            assert str(e).endswith(NO_REQUESTS)  # noqa: PT017
            return
        taken += 1
        assert case.plain(got) == case.plain(sent)

    same()
    assert taken > 30


# --- a field that nobody here knows -----------------------------------------------------------------------------------

WHOLE: Mapping[str, tuple[str, Json]] = {
    "Chat": ("openai-chat", CHAT),
    "Responses": ("openai-responses", RESPONSES),
    "Messages": ("anthropic", {**MESSAGES, "max_tokens": 4096}),
    "Gemini": ("gemini", GEMINI),
}
OURS = {"tokenbus", "metadata", "stream_options", "systemInstruction"}
"""Objects that no provider gets as they are."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body an object is."""
    if isinstance(value, dict):
        yield at
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inside:
        yield from places(each, (*at, name))


@pytest.mark.parametrize("surface", WHOLE)
def test_an_unknown_field_of_any_object_reaches_a_provider_of_the_clients_api_once(surface: str) -> None:
    api, whole = WHOLE[surface]
    for at in places(whole):
        if OURS.intersection(at) or at[-1:] == ("properties",):  # a schema's properties are no fields
            continue
        body: Json = msgspec.json.decode(msgspec.json.encode(whole))  # an object that is there twice is two
        body.get("tokenbus", {}).pop("extra", None)
        inner: Any = body
        for step in at:
            inner = inner[step]
        inner["odd"] = {"unheard": "of"}
        got = received(surface, api, body)
        assert msgspec.json.encode(got).replace(b"\\", b"").count(b'"odd":{"unheard":"of"}') == 1, at


def test_a_choice_of_a_tool_that_goes_to_the_provider_as_it_is_goes_with_it() -> None:
    named: Json = {"type": "custom", "name": "f"}
    for surface, api, tool, choice in (
        ("Responses", "openai-responses", {**named, "odd": 1}, named),
        ("Chat", "openai-chat", {"type": "custom", "custom": {"name": "f", "odd": 1}},
         {"type": "custom", "custom": {"name": "f"}}),
        ("Messages", "anthropic", {"type": "bash_20250124", "name": "bash"}, {"type": "tool", "name": "bash"}),
    ):  # fmt: skip
        body = {**SURFACES[surface][1], "model": WHOLE[surface][1]["model"], "tools": [tool], "tool_choice": choice}
        got = received(surface, api, body)
        assert (got["tools"], got["tool_choice"]) == ([tool], choice), surface


def test_hints_of_an_items_parts_reach_a_provider_of_responses_wherever_they_are() -> None:
    mark: Json = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    image: Json = {"type": "input_image", "image_url": "https://a.example/b.png", "detail": "low", **mark}
    text: Json = {"type": "input_text", "text": "x", **mark}
    call: Json = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    sent: list[Json] = [
        {"role": "system", "content": [text]},
        {"role": "user", "content": [text, image]},
        call,
        {"type": "function_call_output", "call_id": "a", "output": [text, image]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "y", **mark}]},
        {"role": "user", "content": "z"},
    ]
    assert received("Responses", "openai-responses", {"model": "responses/m", "input": sent})["input"] == sent

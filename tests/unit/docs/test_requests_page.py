"""docs/reference/requests.md has exactly the fields of a request, with value, default, bounds, APIs and example."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import msgspec
from msgspec import inspect

from tests.clients.plain import commands
from tests.rows import over_rows
from tests.unit.docs.pages import page, quoted, rows, sections
from tests.unit.docs.sent_fields import OF_ONE_API, SENT
from tokenbus.core.request import bounds
from tokenbus.core.request.bounds import MAX_TENANT_CHARS
from tokenbus.core.request.parse import MAX_REQUEST_BYTES, request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.events.quirks import Quirks
from tokenbus.events.requests import TRACEPARENT_PATTERN, Generate, OnFailure
from tokenbus.providers import registry

TEXT = page("reference/requests.md")
PAGE = sections(TEXT)
OBJECTS: dict[type[msgspec.Struct], str] = {
    requests.Message: "a message",
    requests.TextPart: "a text part",
    requests.ThinkingPart: "a thinking part",
    requests.ImagePart: "an image part",
    requests.DocumentPart: "a document part",
    requests.ToolCallPart: "a tool call part",
    requests.ToolResultPart: "a tool result part",
    requests.ExtraPart: "an extra part",
    requests.Base64Source: "a base64 source",
    requests.UrlSource: "a url source",
    requests.BlobSource: "a blob source",
    requests.FileSource: "a file source",
    requests.Tool: "a tool",
    requests.TextFormat: "a text format",
    requests.GrammarFormat: "a grammar format",
    requests.ToolChoice: "a tool choice",
    requests.Thinking: "thinking options",
    requests.OutputSchema: "an output schema",
    requests.PrefillOptions: "prefill options",
    requests.ImageOptions: "image options",
    requests.Fallback: "a fallback",
    requests.Cancel: "cancel",
    requests.Approval: "approval",
    requests.Answer: "answer",
    requests.ToolResult: "tool_result",
}
GENERATE = "generate"
MODELS = {
    "anthropic": "claude-sonnet-4-6",
    "openai-chat": "gpt-5",
    "openai-responses": "gpt-5",
    "openai-images": "gpt-image-1",
    "gemini": "gemini-2.5-flash",
    "gemini-interactions": "gemini-3.5-flash",
}
BESIDE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [{"name": "weather", "parameters": {"type": "object"}}]},
    "parallel_tool_calls": {"tools": [{"name": "weather", "parameters": {"type": "object"}}]},
    "mode": {"participant": "Claude"},
    "prefill": {"mode": "prefill", "participant": "Claude", "messages": [
        {"role": "user", "content": "Hi", "participant": "Ann"},
        {"role": "user", "content": "Hi", "participant": "Ann"},
    ]},
    "unsigned_thinking": {"messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "thinking", "text": "Hm."}, {"type": "text", "text": "Hello"}]},
        {"role": "user", "content": "Hi"},
    ]},
    "names_in_text": {"messages": [{"role": "user", "content": "Hi", "participant": "Ann"}]},
}  # fmt: skip
"""What else a request has in which a field means something."""
PATTERNS = {
    r"^[A-Za-z0-9._:@~+=-]+$(?!\n)": "text of 1 to 128 of `A-Z a-z 0-9 . _ : @ ~ + = -`",
    TRACEPARENT_PATTERN: "text: a W3C trace context",
    r"^[A-Za-z0-9_-]{1,64}$(?!\n)": "text of 1 to 64 of `A-Z a-z 0-9 _ -`",
    r"^[0-9]{1,9}\.[0-9]{1,6}$(?!\n)": "text: the `wait` of a `waiting` event",
    r"^[A-Za-z0-9:._-]{1,64}$(?!\n)": "text of 1 to 64 of `A-Z a-z 0-9 : . _ -`",
}
BUS = "the bus"
MOST = {
    "the request, in bytes": MAX_REQUEST_BYTES,
    "messages": bounds.MAX_MESSAGES,
    "parts of a message or of a tool result": bounds.MAX_PARTS,
    "tools": bounds.MAX_TOOLS,
    "stop strings": bounds.MAX_STOPS,
    "characters of a stop string": bounds.MAX_STOP_CHARS,
    "bytes of a JSON schema": bounds.MAX_SCHEMA_BYTES,
    "characters of a tool's description": bounds.MAX_DESCRIPTION_CHARS,
    "bytes of `metadata`, as JSON": bounds.MAX_METADATA_BYTES,
    "bytes of `extra`, as JSON": bounds.MAX_EXTRA_BYTES,
    "characters of a participant, a tool id or a title": bounds.MAX_NAME_CHARS,
    "characters of `metadata.tenant`": MAX_TENANT_CHARS,
    "characters of a url": bounds.MAX_URL_CHARS,
    "fields of `opaque`, and of `opaque_blobs`": bounds.MAX_OPAQUE,
    "seconds of `deadline_s` and `tool_timeout_s`": int(bounds.MAX_SECONDS),
    "`max_tokens`": bounds.MAX_TOKENS,
}


def fields(cls: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    return kind.fields


def value(kind: inspect.Type) -> str:
    """What a field may hold, in the page's words."""
    match kind:
        case inspect.Metadata():
            return value(kind.type)
        case inspect.UnionType():
            kinds = [value(one) for one in kind.types if not isinstance(one, inspect.NoneType)]
            return " or ".join(dict.fromkeys(kinds))
        case inspect.StructType():
            name = OBJECTS[kind.cls]
            return f"[{name}](#{name.replace(' ', '-')})"
        case inspect.ListType():
            return f"list{_size(kind.min_length, kind.max_length)}: {value(kind.item_type)}"
        case inspect.LiteralType():
            return ", ".join(f"`{one}`" for one in kind.values)
        case inspect.StrType():
            if kind.pattern:
                return PATTERNS[kind.pattern]
            size = _size(kind.min_length, kind.max_length)
            return f"text{size} characters" if size else "text"
        case inspect.IntType() | inspect.FloatType():
            return ("whole number" if isinstance(kind, inspect.IntType) else "number") + _bounds(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.DictType():
            return "object of texts" if isinstance(kind.value_type, inspect.StrType) else "object"
        case inspect.AnyType():
            return "anything"
        case _:
            raise AssertionError(kind)


def _size(least: int | None, most: int | None) -> str:
    if most is not None:
        return f" of {least or 0} to {most}"
    return f" of {least} or more" if least else ""


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.gt is not None:
        return f" above {kind.gt}"
    if kind.ge is None:
        return ""
    return f" from {kind.ge}" if kind.le is None else f" {kind.ge} to {kind.le}"


def default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    chosen: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "none" if chosen is None else f"`{json.dumps(chosen)}`"


def request(api: str, given: dict[str, Any]) -> Generate:
    base = {"type": "generate", "provider": api, "model": MODELS[api], "messages": [{"role": "user", "content": "Hi"}]}
    made = request_from(base | given)
    assert isinstance(made, Generate)
    return made


def body(api: str, given: dict[str, Any]) -> bytes | None:
    """What the provider is sent; None if the request is refused."""
    try:
        call = registry.get(api).build(request(api, given), [], Quirks()).call
    except RequestInvalid:
        return None
    return call.path.encode() + call.body


def named(apis: list[str]) -> str:
    return "all" if len(apis) == len(MODELS) else ", ".join(f"`{api}`" for api in apis) or BUS


def sent_to(field: str, example: Any) -> str:
    """The APIs whose calls differ with the field, in the page's words."""
    beside = BESIDE.get(field, {})
    return named([api for api in MODELS if body(api, {**beside, field: example}) not in (None, body(api, beside))])


def field_sent_to(name: str, field: str) -> str:
    """The same for a field of an object of a request: the APIs whose calls differ with its value."""
    if field in OF_ONE_API:
        return OF_ONE_API[field]
    example, others, requests_with = SENT[name]
    other = example | {field: others[field]}
    return named(
        [api for api in MODELS if any(body(api, w(other)) not in (None, body(api, w(example))) for w in requests_with)]
    )


def test_each_object_of_a_request_is_on_the_page_and_no_other() -> None:
    assert set(PAGE) == {"Publish", "JSON Schema", GENERATE, "on_failure", *OBJECTS.values(), "Bounds"}


def test_the_fields_of_a_request_are_those_of_the_code() -> None:
    expected = {field.encode_name: (value(field.type), default(field)) for field in fields(Generate)}
    table = rows(PAGE[GENERATE])
    assert {quoted(name): (kind, otherwise) for name, kind, otherwise, _, _, what in table if what} == expected


@over_rows("field", [field.encode_name for field in fields(Generate)])
def test_a_field_is_sent_to_the_apis_that_the_page_names_and_its_example_is_taken(field: str) -> None:
    (row,) = [row for row in rows(PAGE[GENERATE]) if quoted(row[0]) == field]
    example = json.loads(quoted(row[4]))
    if field == "provider":
        assert request(example, {}).provider == example
    elif field in ("model", "messages"):
        assert (row[3], msgspec.to_builtins(getattr(request("anthropic", {field: example}), field))) == ("all", example)
    else:
        assert sent_to(field, example) == row[3]


@over_rows("kind", OBJECTS, ids=OBJECTS.values())
def test_an_object_of_a_request_is_as_the_page_says(kind: type[msgspec.Struct]) -> None:
    expected = {field.encode_name: (value(field.type), default(field)) for field in fields(kind)}
    table = rows(PAGE[OBJECTS[kind]])
    assert {quoted(name): (kind, otherwise) for name, kind, otherwise, *_, what in table if what} == expected


@over_rows("name", SENT)
def test_the_fields_of_an_object_are_sent_to_the_apis_that_the_page_names(name: str) -> None:
    documented = {quoted(field): apis for field, _, _, apis, _ in rows(PAGE[name])}
    assert documented == {field: field_sent_to(name, field) for field in documented}
    assert SENT[name].others.keys() == documented.keys() - OF_ONE_API.keys()


@over_rows("kind", OBJECTS, ids=OBJECTS.values())
def test_the_example_of_an_object_is_one(kind: type[msgspec.Struct]) -> None:
    (example,) = re.findall(r"```json\n(.+)\n```", PAGE[OBJECTS[kind]])
    assert msgspec.to_builtins(msgspec.convert(json.loads(example), kind)) == json.loads(example)


def test_the_choices_after_a_failure_are_those_of_the_code() -> None:
    assert sorted(quoted(name) for name, what in rows(PAGE["on_failure"]) if what) == sorted(get_args(OnFailure))


def test_the_bounds_are_those_of_the_code() -> None:
    assert {what: int(most.split()[0].replace(",", "")) for what, most in rows(PAGE["Bounds"])} == MOST


def test_the_command_is_run_by_another_test_and_the_examples_are_the_same_request() -> None:
    first = json.loads(re.findall(r"```json\n(.+)\n```", TEXT)[0])
    (command,) = commands(TEXT)
    assert command in commands(page("guides/any-language.md"))
    assert json.loads(command.split("'")[1]) == first
    assert request_from(first)

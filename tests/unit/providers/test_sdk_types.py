"""What we send is what the providers' own SDKs would: their request types take it, unknown fields refused.

The SDKs are development dependencies; a test says that it was skipped if one is absent.
"""

from __future__ import annotations

import warnings
from base64 import b64decode
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import pytest

from tests.rows import over_rows
from tests.unit.providers.corpus import Recording, needs_corpus, recordings
from tests.unit.providers.reading import answer, read
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.outbox import Outbox
from tokenbus.events import normalized as n
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    Generate,
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
    UrlSource,
)
from tokenbus.providers import registry

APIS: list[ApiName] = ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"]
SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def sdk_accepts(api: ApiName, body: dict[str, Any]) -> None:
    """Raises ValidationError if the SDK's types of a request refuse the body."""
    stream = bool(body.get("stream"))
    match api:
        case "anthropic":
            # With what is in beta, for recorded answers have it.
            kinds = pytest.importorskip("anthropic.types.beta.message_create_params")
            whole = kinds.MessageCreateParamsStreaming if stream else kinds.MessageCreateParamsNonStreaming
            _taken(whole, body)
        case "openai-chat" if "prompt" in body:
            kinds = pytest.importorskip("openai.types.completion_create_params")
            whole = kinds.CompletionCreateParamsStreaming if stream else kinds.CompletionCreateParamsNonStreaming
            _taken(whole, body)
        case "openai-chat":
            kinds = pytest.importorskip("openai.types.chat.completion_create_params")
            whole = kinds.CompletionCreateParamsStreaming if stream else kinds.CompletionCreateParamsNonStreaming
            _taken(whole, body)
        case "openai-responses":
            kinds = pytest.importorskip("openai.types.responses.response_create_params")
            whole = kinds.ResponseCreateParamsStreaming if stream else kinds.ResponseCreateParamsNonStreaming
            _taken(whole, body)
        case "openai-images" if body.keys() & {"image", "image[]", "images"}:
            kinds = pytest.importorskip("openai.types.image_edit_params")
            body = _edit(body)
            whole = kinds.ImageEditParamsStreaming if body["stream"] else kinds.ImageEditParamsNonStreaming
            _taken(whole, body)
        case "openai-images":
            kinds = pytest.importorskip("openai.types.image_generate_params")
            whole = kinds.ImageGenerateParamsStreaming if stream else kinds.ImageGenerateParamsNonStreaming
            _taken(whole, body)
        case "gemini":
            _gemini_accepts(body)
        case "gemini-interactions":
            _interactions_accepts(body)


def _edit(body: dict[str, Any]) -> dict[str, Any]:
    """The edit as the SDK is given it. A form has texts for numbers and truth; the SDK has no type for the whole of the
    other way, JSON with references, but for those."""
    body = dict(body)
    if "images" in body:
        kinds = pytest.importorskip("openai.types.image_input_reference_param")
        for reference in (*body["images"], *([body["mask"]] if "mask" in body else [])):
            _taken(kinds.ImageInputReferenceParam, reference)
        images = [b"" for _ in body.pop("images")]
        return body | {"image": images, "mask": b""}
    typed = {name: int(body[name]) for name in ("n", "partial_images") if name in body}
    body |= typed | {"stream": {"true": True, "false": False}[body["stream"]]}
    files = body.pop("image[]") if "image[]" in body else [body.pop("image")]
    return (
        body | {"image": [_upload(file) for file in files]} | ({"mask": _upload(m)} if (m := body.get("mask")) else {})
    )


def _upload(file: dict[str, Any]) -> tuple[str, bytes, str]:
    return file["filename"], b64decode(file["data"]), file["media_type"]


def _taken(kind: Any, body: dict[str, Any]) -> None:
    """A TypedDict takes the body. Its iterables are checked only when they are gone through."""
    _go_through(_strict(kind).validate_python([body]))


@cache
def _strict(kind: Any) -> Any:
    pydantic = pytest.importorskip("pydantic")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some types say that they take further fields, whatever is asked here
        return pydantic.TypeAdapter(
            list[kind], config=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        )


def _go_through(value: Any) -> None:
    if isinstance(value, Mapping):
        value = value.values()
    if not isinstance(value, str | bytes | int | float | None):
        for inner in value:
            _go_through(inner)


def _gemini_accepts(body: dict[str, Any]) -> None:
    """Google's SDK has a model for each field of a request, and none for its whole; `imageConfig` has its own too."""
    types = pytest.importorskip("google.genai.types")
    if form := body.get("generationConfig", {}).pop("imageConfig", None):
        types.ImageConfig.model_validate(form)
    models = {
        "contents": lambda value: [types.Content.model_validate(content) for content in value],
        "systemInstruction": types.Content.model_validate,
        "generationConfig": types.GenerationConfig.model_validate,
        "tools": lambda value: [types.Tool.model_validate(tool) for tool in value],
        "toolConfig": types.ToolConfig.model_validate,
    }
    for name, value in body.items():
        models[name](value)


def _interactions_accepts(body: dict[str, Any]) -> None:
    """Google's SDK has models that take any field. Its dicts for the same are strict but for the citations that it
    gave; a mode of `ImageContent` that it knows by its type only is not checked either."""
    kinds = pytest.importorskip("google.genai.interactions")
    _taken(kinds.CreateModelInteractionParam, body)


CONVERSATION = [
    Message(role="system", content="Be kind."),
    Message(
        role="user",
        content=[
            TextPart(text="Look:"),
            ImagePart(source=Base64Source(media_type="image/png", data=PIXEL)),
            ImagePart(source=UrlSource(url="https://example.com/y.png")),
            DocumentPart(source=Base64Source(media_type="application/pdf", data=PIXEL), title="a.pdf"),
        ],
    ),
    Message(
        role="assistant",
        content=[
            ThinkingPart(text="Hm", signature="c2ln"),
            TextPart(text="Let me see."),
            ToolCallPart(tool_id="t1", tool_name="weather", arguments='{"city": "Bonn"}'),
            ToolCallPart(tool_id="t2", tool_name="now", arguments=""),
            ToolCallPart(tool_id="t3", tool_name="now", arguments="{broken"),
        ],
    ),
    Message(
        role="tool",
        content=[
            ToolResultPart(tool_id="t1", content="Rain"),
            ToolResultPart(tool_id="t2", content=[TextPart(text="noon")], is_error=True),
        ],
    ),
    Message(role="user", content="And?"),
]


@over_rows("stream", [True, False])
@over_rows("choice", [None, "auto", "none", "any", ToolChoice(name="now")])
@over_rows("thinking", [None, Thinking(enabled=False), Thinking(effort="low"), Thinking(budget_tokens=2000)], ids=str)
@over_rows("api", APIS)
def test_the_sdks_types_take_a_request_with_everything(
    api: ApiName, thinking: Thinking | None, choice: Any, stream: bool
) -> None:
    request = Generate(
        provider=api,
        model="m",
        messages=CONVERSATION,
        system=[TextPart(text="Be brief.", cache=True), TextPart(text="Be exact.")],
        tools=[Tool(name="weather", description="The weather.", parameters=SCHEMA), Tool(name="now")],
        tool_choice=choice,
        max_tokens=4000,
        # Anthropic's SDK has no fields for sampling any more; its older models take them.
        temperature=None if api == "anthropic" else 0.5,
        top_p=None if api == "anthropic" else 0.9,
        stop=[] if api == "openai-responses" else ["END"],
        thinking=thinking,
        output_schema=OutputSchema(schema=SCHEMA, name="city", strict=stream),
        stream=stream,
    )
    call = registry.get(api).build(request, [], Quirks()).call
    sdk_accepts(api, msgspec.json.decode(call.body))


@pytest.mark.parametrize("api", APIS)
def test_the_sdks_types_refuse_a_field_that_the_api_does_not_have(api: ApiName) -> None:
    odd: dict[str, object] = {"generationConfig": {"odd": 1}} if api == "gemini" else {"odd": 1}
    request = Generate(provider=api, model="m", messages=[Message(role="user", content="Hi")], extra=odd)
    call = registry.get(api).build(request, [], Quirks()).call
    with pytest.raises(ValueError, match="odd"):
        sdk_accepts(api, msgspec.json.decode(call.body))


def said_again(events: list[n.Normalized]) -> Message:
    """What the next turn appends, as a run keeps it."""
    table = BlockTable(turn=0, attempt=1, limit=2**24, next_number=0)
    out = Outbox()
    for event in events:
        match event:
            case n.BlockStart():
                table.start(event.block, event.kind, out)
            case n.ToolCallStart():
                table.start(event.block, "tool_call", out, event.tool_id, event.name)
            case n.TextDelta() | n.ThinkingDelta() | n.RefusalDelta():
                table.write(event.block, event.text, out)
            case n.ToolCallDelta():
                table.write(event.block, event.fragment, out)
            case n.BlockStop() | n.ToolCallDone():
                table.complete(event.block, out)
            case n.Opaque():
                table.keep(event)
            case n.ItemStart():
                table.start(event.block, "server_tool", out, event.tool_id, event.tool_name, item=event.item)
            case _:
                pass
    return Message(role="assistant", content=table.message_parts())


OWN = {
    "anthropic": ("anthropic",),
    "openai_chat": ("openai", "azure"),
    "openai_responses": ("openai", "azure"),
    "gemini": ("google", "google-ai-studio", "google-vertex"),
}
"""Vendors whose own SDK it is."""


def own_turns() -> list[Recording]:
    """Recorded turns of those vendors, whole."""
    rows = [row for row in recordings(*OWN) if row.vendor in OWN[row.api] and row.provenance == "recorded-real"]
    return [row for row in rows if isinstance(answer(read(row.api_name, row.data)).terminal, n.Done)]


@needs_corpus
@over_rows("row", own_turns(), ids=lambda row: row.file)
def test_an_answer_is_sent_back_as_the_providers_sdk_would_send_it(row: Recording) -> None:
    result = said_again(read(row.api_name, row.data))
    hi = Message(role="user", content="Hi")
    assert isinstance(result.content, list)
    results = [
        ToolResultPart(tool_id=part.tool_id, content="ok") for part in result.content if isinstance(part, ToolCallPart)
    ]
    history = [result, Message(role="tool", content=list(results)) if results else hi]
    request = Generate(provider="p", model="m", messages=[hi])
    built = registry.get(row.api_name).build(request, history, Quirks())
    assert built.notes == ()
    sdk_accepts(row.api_name, msgspec.json.decode(built.call.body))

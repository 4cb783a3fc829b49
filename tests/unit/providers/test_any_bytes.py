"""For any bytes: no exception, exactly one terminal event, serialisable events and state, bounded memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.providers.corpus import APIS as CORPUS_APIS
from tests.unit.providers.corpus import recordings
from tests.unit.providers.reading import answer, cut, decoder, read, read_pieces, sse
from tokenbus.core.run.blocks.public_blocks import parse_arguments
from tokenbus.errors import Malformed
from tokenbus.events.normalized import Failed, Normalized
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.providers import registry
from tokenbus.providers.response import json_decode
from tokenbus.providers.response.decoder import MAX_HELD_BYTES, MAX_OPEN_BLOCKS
from tokenbus.providers.response.usage import count

APIS: list[ApiName] = ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"]
api_names = st.sampled_from(APIS)

SEEDS = [row.data for row in recordings(*CORPUS_APIS) if row.bytes < 5000] or [b"data: {}\n\n"]

ANTHROPIC_KEYS = ["type", "index", "delta", "content_block", "message", "text", "id", "name", "input", "usage", "error"]
MORE_KEYS = ["item", "output_index", "response", "output", "arguments", "candidates", "parts", "functionCall", "args"]
CHAT_KEYS = ["choices", "delta", "message", "content", "tool_calls", "function", "index", "finish_reason", "usage"]
TAGS = [
    "message_start",
    "message",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
    "text",
    "text_delta",
    "input_json_delta",
    "citations_delta",
    "tool_use",
    "server_tool_use",
    "thinking",
    "odd",
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(TAGS)
)
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(ANTHROPIC_KEYS + CHAT_KEYS + MORE_KEYS) | st.text(max_size=4), inner, max_size=5
        )
    ),
    max_leaves=12,
)
anthropic_events = st.builds(
    lambda tag, index, inner_tag, more: {
        "type": tag,
        "index": index,
        "message": {"id": str(index), "content": []},
        "content_block": {"type": inner_tag, "id": "i", "name": "n", **more},
        "delta": {"type": inner_tag, "text": "t", "partial_json": "{", "thinking": "", "citation": more, **more},
    },
    st.sampled_from(TAGS),
    st.integers(0, 2),
    st.sampled_from(TAGS),
    st.dictionaries(st.sampled_from(ANTHROPIC_KEYS), leaves, max_size=2),
)


RESPONSES_TYPES = [
    "response.created",
    "response.completed",
    "response.incomplete",
    "response.output_item.added",
    "response.output_item.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.output_text.annotation.added",
    "response.content_part.done",
    "response.refusal.delta",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "response.reasoning_text.delta",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.done",
    "response.image_generation_call.partial_image",
    "response.odd",
]
ITEM_TYPES = ["message", "reasoning", "function_call", "custom_tool_call", "image_generation_call", "odd_call"]
items = st.builds(
    lambda kind, name, whole, more: {
        "type": kind,
        "id": "i",
        "name": name,
        "content": [{"text": "t", "annotations": [{}]}] if whole else [],
        "summary": [{"text": "t"}] if whole else [],
        "arguments": "{" if whole else "",
        "result": "AAAA" if whole else None,
        **more,
    },
    st.sampled_from(ITEM_TYPES),
    st.sampled_from(["n", ""]),
    st.booleans(),
    st.dictionaries(st.sampled_from(["status", "arguments", "encrypted_content", "phase"]), leaves, max_size=1),
)
responses_events = st.builds(
    lambda tag, index, item, output, more: {
        "type": tag,
        "output_index": index,
        "delta": "t",
        "text": "T",
        "arguments": "{}",
        "input": "x",
        "annotation": {},
        "partial_image_b64": "AAAA",
        "item": item,
        "response": {"output": output, "usage": {"input_tokens": index}},
        **more,
    },
    st.sampled_from(RESPONSES_TYPES),
    st.integers(0, 2),
    items,
    st.lists(items, max_size=3),
    st.dictionaries(st.sampled_from(["content_index", "summary_index", "delta"]), leaves, max_size=1),
)
parts = st.sampled_from(
    [
        {"text": "t"},
        {"text": "t", "thought": True},
        {"text": "", "thoughtSignature": "s"},
        {"text": "t", "thoughtSignature": "s"},
        {"thoughtSignature": "s"},
        {"functionCall": {"name": "f", "args": {"a": 1}}},
        {"functionCall": {"name": "f", "willContinue": True}, "thoughtSignature": "s"},
        {"functionCall": {"partialArgs": [{"jsonPath": "$.a", "stringValue": "x"}], "willContinue": True}},
        {"functionCall": {"partialArgs": [{"jsonPath": "$.b[0].c", "numberValue": 1}]}},
        {"functionCall": {}},
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"executableCode": {"code": "1"}},
    ]
)
gemini_events = st.builds(
    lambda parts, finish, more: {
        "candidates": [{"content": {"parts": parts}, "finishReason": finish, **more}],
        "usageMetadata": {"totalTokenCount": len(parts)},
    },
    st.lists(parts | objects, max_size=4),
    st.sampled_from([None, "STOP", "SAFETY"]),
    st.dictionaries(st.sampled_from(["index", "citationMetadata", "finishMessage"]), leaves, max_size=1),
)
steps = st.sampled_from(
    [
        {"type": "model_output"},
        {"type": "model_output", "content": [{"type": "text", "text": "t", "annotations": [{"url": "u"}]}]},
        {"type": "thought", "summary": [{"type": "text", "text": "h"}], "signature": "s"},
        {"type": "function_call", "id": "c", "name": "f", "arguments": {"a": 1}},
        {"type": "function_call"},
        {"type": "google_search_call", "id": "g", "arguments": {"queries": ["q"]}},
        {"type": "google_search_result", "call_id": "g", "result": [{"title": "t"}]},
        {"type": "user_input", "content": []},
    ]
)
deltas = st.sampled_from(
    [
        {"type": "text", "text": "t"},
        {"text": "t"},
        {"type": "text_annotation_delta", "annotations": [{"url": "u"}]},
        {"type": "thought_summary", "content": {"type": "text", "text": "h"}},
        {"type": "thought_summary", "content": {"type": "image", "data": "AAAA", "mime_type": "image/png"}},
        {"type": "thought_signature", "signature": "s"},
        {"type": "arguments_delta", "arguments": '{"a":'},
        {"type": "image", "data": "AAAA", "mime_type": "image/png"},
        {"type": "image", "uri": "https://example.org/i"},
        {"type": "audio", "data": "AAAA", "mime_type": "audio/l16", "sample_rate": 24000},
        {"type": "video", "uri": "https://example.org/v"},
        {"type": "google_search_result", "result": [{"title": "u"}], "signature": "s"},
        {"type": "odd", "x": 1},
    ]
)
interaction_events = st.builds(
    lambda tag, index, step, delta, whole, status, more: {
        "event_type": tag,
        "index": index,
        "step": step,
        "delta": delta,
        "status": status,
        "interaction": {"id": "i", "status": status, "steps": whole, "usage": {"total_tokens": index}},
        **more,
    },
    st.sampled_from(
        [f"interaction.{name}" for name in ("created", "status_update", "completed", "odd")]
        + [f"step.{name}" for name in ("start", "delta", "delta", "delta", "stop")]
    ),
    st.integers(0, 2),
    steps | objects,
    deltas | objects,
    st.lists(steps, max_size=3),
    st.sampled_from(["in_progress", "completed", "requires_action", "failed", "odd"]),
    st.dictionaries(st.sampled_from(["usage", "metadata", "event_id"]), leaves, max_size=1),
)
STARTS: dict[ApiName, object] = {
    "anthropic": {"type": "message_start", "message": {"model": "m"}},
    "openai-chat": {"model": "m"},
    "openai-responses": {"type": "response.created", "response": {"tools": []}},
    "gemini": {"modelVersion": "m"},
    "gemini-interactions": {"event_type": "interaction.created", "interaction": {"status": "in_progress"}},
}

damage = st.binary(max_size=4) | st.sampled_from([b"null", b"{", b'"', b"\n\n"])


def sound(api: ApiName, events: list[Normalized]) -> None:
    """One terminal event, the last; every event can travel."""
    answer(events)
    for event in events:
        msgspec.msgpack.encode(event)


@settings(max_examples=150, deadline=None)
@given(api_names, st.binary(max_size=300), st.booleans(), st.sampled_from([200, 400, 503]))
def test_random_bytes_end_in_one_terminal_event(api: ApiName, data: bytes, stream: bool, status: int) -> None:
    sound(api, read(api, data, stream=stream, status=status))


@settings(max_examples=500, deadline=None)
@given(
    api_names,
    st.lists(objects | anthropic_events | responses_events | gemini_events | interaction_events, max_size=8),
    st.data(),
)
def test_random_events_end_in_one_terminal_event_however_they_are_cut(
    api: ApiName, events: list[object], draw: st.DataObject
) -> None:
    data = sse(STARTS[api], *events, {"type": "message_stop"}, b"data: [DONE]\n\n")
    whole = read(api, data)
    sound(api, whole)
    sound(api, read(api, data, quirks=Quirks(inline_thinking=("think",))))
    places = draw.draw(st.lists(st.integers(0, len(data)), max_size=4))
    assert read_pieces(api, cut(data, places), restored=True) == whole


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_a_damaged_stream_ends_in_one_terminal_event_however_it_is_cut(data: bytes, draw: st.DataObject) -> None:
    api = draw.draw(api_names)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data)))
        length = draw.draw(st.integers(0, 40))
        data = data[:at] + draw.draw(damage) + data[at + length :]
    whole = read(api, data)
    sound(api, whole)
    places = draw.draw(st.lists(st.integers(0, len(data)), max_size=4))
    assert read_pieces(api, cut(data, places), restored=True) == whole


def state_size(api: ApiName, stream: bytes) -> tuple[int, list[Normalized]]:
    reader = decoder(api)
    events = reader.feed(stream)
    return len(msgspec.msgpack.encode(reader)), events + reader.end()


BLOCK = b'data: {"type":"content_block_start","index":%d,"content_block":{"type":"tool_use","id":"i","name":"n"}}\n\n'
START = b'data: {"type":"message_start","message":{}}\n\n'
ITEM = b'data: {"type":"content_block_start","index":0,"content_block":{"type":"server_tool_use"}}\n\n'
TEXT = b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":"a"}}\n\n'
PIECE = b"x" * 1000
ANNOUNCED = (
    b'data: {"type":"response.output_item.added","output_index":%d,"item":{"type":"function_call","name":"%s"}}\n\n'
)
GREEDY: dict[str, tuple[ApiName, bytes]] = {
    "an endless event": ("anthropic", START + b"data: " + b"x" * (MAX_HELD_BYTES + 1000)),
    "endless blocks": ("anthropic", START + b"".join(BLOCK % i for i in range(MAX_OPEN_BLOCKS + 1))),
    "an endless server tool's input": (
        "anthropic",
        START
        + ITEM
        + b'data: {"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"%s"}}\n\n'
        % PIECE
        * 9000,
    ),
    "endless citations": (
        "anthropic",
        START
        + TEXT
        + b'data: {"type":"content_block_delta","index":0,"delta":{"type":"citations_delta","citation":"%s"}}\n\n'
        % PIECE
        * 9000,
    ),
    "endless calls": (
        "openai-chat",
        b"".join(
            b'data: {"choices":[{"delta":{"tool_calls":[{"index":%d,"function":{"name":"n"}}]}}]}\n\n' % i
            for i in range(MAX_OPEN_BLOCKS + 1)
        ),
    ),
    "endless arguments of a call without a name": (
        "openai-chat",
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"%s"}}]}}]}\n\n' % PIECE * 9000,
    ),
    "endless reasoning details": (
        "openai-chat",
        b'data: {"choices":[{"delta":{"reasoning_details":[{"type":"t","text":"%s"}]}}]}\n\n' % PIECE * 9000,
    ),
    "endless items": ("openai-responses", b"".join(ANNOUNCED % (i, b"f") for i in range(MAX_OPEN_BLOCKS + 1))),
    "endless arguments of a function without a name": (
        "openai-responses",
        ANNOUNCED % (0, b"")
        + b'data: {"type":"response.function_call_arguments.delta","output_index":0,"delta":"%s"}\n\n' % PIECE * 9000,
    ),
    "endless annotations": (
        "openai-responses",
        b'data: {"type":"response.output_text.annotation.added","output_index":0,"annotation":"%s"}\n\n' % PIECE * 9000,
    ),
    "endless keys of streamed arguments": (
        "gemini",
        b'data: {"candidates":[{"content":{"parts":[{"functionCall":{"name":"f","willContinue":true}}]}}]}\n\n'
        + b"".join(
            b'data: {"candidates":[{"content":{"parts":[{"functionCall":{"willContinue":true,'
            b'"partialArgs":[{"jsonPath":"$.%s%d","boolValue":true}]}}]}}]}\n\n' % (PIECE, i)
            for i in range(9000)
        ),
    ),
}


@pytest.mark.parametrize("greed", GREEDY)
def test_what_is_held_back_is_bounded_and_its_limit_is_a_named_error(greed: str) -> None:
    api, stream = GREEDY[greed]
    size, events = state_size(api, stream)
    assert size < MAX_HELD_BYTES + 100_000
    terminal = events[-1]
    assert isinstance(terminal, Failed)
    assert (terminal.error.code, terminal.error.kind) == ("too_large", "limit")
    content = terminal.error.message.startswith("buffered content:")
    assert (" bytes or characters, the limit is " in terminal.error.message) == content


def test_an_errors_endless_body_is_kept_in_part() -> None:
    reader = decoder("anthropic", status=500)
    for _ in range(100):
        assert reader.feed(b"x" * 10_000) == []
    assert len(msgspec.msgpack.encode(reader)) < 70_000
    [terminal] = reader.end()
    assert isinstance(terminal, Failed)
    assert len(terminal.error.message) + len(terminal.error.raw or "") < 10_000


def test_a_decoder_is_restored_by_its_provider() -> None:
    for api in APIS:
        reader = decoder(api)
        again = registry.get(api).restore(msgspec.msgpack.encode(reader))
        assert again == reader


@pytest.mark.parametrize("number", ["1e300", "-5", str(10**15), str(2**63 - 1)])
def test_a_count_that_no_answer_has_is_none(number: str) -> None:
    assert count(msgspec.json.decode(f'{{"input_tokens": {number}}}'), "input_tokens") is None


def test_what_is_nested_too_deeply_or_no_text_is_named_without_words_of_python() -> None:
    deep = '{"a":' * 5_000 + "1" + "}" * 5_000
    with pytest.raises(Malformed, match="nested too deeply"):
        json_decode.read(msgspec.json.Decoder(dict[str, object]), deep.encode(), "event")
    for arguments in (deep, '{"a":"\ud800"}'):
        parsed, problem = parse_arguments(arguments)
        assert parsed is None
        assert problem in ("not a JSON object: nested too deeply", "not a JSON object: not Unicode text")

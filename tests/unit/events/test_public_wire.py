"""The wire form of every public event, letter by letter: what a reader in any language may rely on.

A change here breaks readers: new optional fields may come, nothing may go or change its meaning.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import over_rows
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    TERMINAL,
    Answering,
    AudioRef,
    BlockComplete,
    BlockProgress,
    BlockStarted,
    Cancelled,
    ChildEnded,
    ChildStarted,
    Chunk,
    Completed,
    ImagePreview,
    ImageRef,
    Incomplete,
    ProviderModel,
    PublicEvent,
    Restarted,
    Resumed,
    Retrying,
    RunFailedEvent,
    Started,
    TerminalEvent,
    Timing,
    ToolProgress,
    UnknownEvent,
    UsageReported,
    Waiting,
    decode,
    encode,
)
from tokenbus.events.usage import Usage

AT: dict[str, Any] = {"run": "r1", "seq": 4, "turn": 1, "attempt": 2}
OF_CALL: dict[str, Any] = {"block": 2, "tool_id": "c1", "tool_name": "help"}
CALL: dict[str, Any] = {"wait": "2.0", "what": "approval", "block": 2, "tool_id": "c1", "tool_name": "pay"}
CALL_JSON = ',"wait":"2.0","what":"approval","block":2,"tool_id":"c1","tool_name":"pay"'
HEAD = '"run":"r1","seq":4,"turn":1,"attempt":2'
IN_SESSION: dict[str, Any] = {**AT, "session": "s1"}
SESSION_HEAD = HEAD + ',"session":"s1"'
ERROR = ErrorInfo(
    code="overloaded_error",
    kind="overloaded",
    message="Overloaded",
    retryable=True,
    retry_after_s=1.5,
    status=529,
    where="event error",
    raw="{}",
)
OTHER = ProviderModel(provider="q", model="n")
OTHER_JSON = '{"provider":"q","model":"n"}'
ERROR_JSON = (
    '{"code":"overloaded_error","class":"overloaded","message":"Overloaded","retryable":true,'
    '"retry_after_s":1.5,"status":529,"where":"event error","raw":"{}"}'
)
TIMING = Timing(first_byte_ms=300, first_visible_ms=320, total_ms=900)
TIMING_JSON = '{"first_byte_ms":300,"first_visible_ms":320,"total_ms":900}'
USAGE = Usage(input=10, output=20, reasoning=5, cache_read=2, cache_write=3, total=30, raw={"input_tokens": 10})
USAGE_JSON = (
    '{"input":10,"output":20,"reasoning":5,"cache_read":2,"cache_write":3,"total":30,"raw":{"input_tokens":10}}'
)

FULL: list[tuple[PublicEvent, str]] = [
    (
        Chunk(
            **IN_SESSION,
            block=3,
            kind="tool_call",
            text='{"ci',
            visible=False,
            depth=0,
            tool_call_part="input",
            tool_id="t1",
            tool_name="weather",
        ),
        '{"type":"chunk",' + SESSION_HEAD + ',"block":3,"kind":"tool_call","text":"{\\"ci","visible":false,"depth":0,'
        '"tool_call_part":"input","tool_id":"t1","tool_name":"weather"}',
    ),
    (
        BlockStarted(
            **IN_SESSION,
            block=3,
            kind="tool_call",
            tool_id="t1",
            tool_name="weather",
            prompt="p",
            free_text=True,
            item="a.b",
            phase="q",
        ),
        '{"type":"block_start",' + SESSION_HEAD + ',"block":3,"kind":"tool_call","tool_id":"t1","tool_name":"weather",'
        '"prompt":"p","free_text":true,"item":"a.b","phase":"q"}',
    ),
    (
        ImagePreview(
            **IN_SESSION, block=3, kind="image", index=1, image=ImageRef(media_type="image/png", base64="aGk=")
        ),
        '{"type":"image_preview",' + SESSION_HEAD + ',"block":3,"kind":"image","index":1,'
        '"image":{"media_type":"image/png","base64":"aGk="}}',
    ),
    (
        ToolProgress(
            **IN_SESSION, block=3, tool_id="t1", tool_name="weather", progress=1, total=4, message="one of four"
        ),
        '{"type":"tool_progress",'
        + SESSION_HEAD
        + ',"block":3,"tool_id":"t1","tool_name":"weather","progress":1,"total":4,'
        '"message":"one of four"}',
    ),
    (
        BlockProgress(
            **IN_SESSION, block=3, kind="server_tool", status="searching", tool_id="t1", tool_name="web_search"
        ),
        '{"type":"block_progress",'
        + SESSION_HEAD
        + ',"block":3,"kind":"server_tool","status":"searching","tool_id":"t1",'
        '"tool_name":"web_search"}',
    ),
    (
        BlockComplete(
            **IN_SESSION,
            block=3,
            kind="tool_call",
            content="c",
            tool_id="t1",
            tool_name="weather",
            arguments='{"city":"Brno"}',
            input={"city": "Brno"},
            input_error="no JSON",
            free_text=True,
            is_error=True,
            signature="sig",
            opaque={"item_id": "fc_1", "api": "openai-responses"},
            opaque_blobs={"encrypted": "sha256:03"},
            item="gemini.executableCode",
            phase="commentary",
            image=ImageRef(
                media_type="image/png",
                blob_id="sha256:00",
                base64="aGk=",
                revised_prompt="a cat",
                prompt="cat",
                model="gpt-image-2",
                size="8x8",
                quality="low",
                size_bytes=2,
                width=8,
                height=9,
                draft=True,
            ),
            audio=AudioRef(
                media_type="audio/wav",
                blob_id="sha256:04",
                base64="aGk=",
                size_bytes=2,
                audio_id="audio_1",
                expires_at=9,
            ),
            blob_id="sha256:01",
            images=[ImageRef(media_type="image/webp", blob_id="sha256:02")],
            cut=True,
            provider_extra=[{"name": "citation"}],
        ),
        '{"type":"block_complete",' + SESSION_HEAD + ',"block":3,"kind":"tool_call","content":"c","tool_id":"t1",'
        '"tool_name":"weather","arguments":"{\\"city\\":\\"Brno\\"}","input":{"city":"Brno"},"input_error":"no JSON",'
        '"free_text":true,"is_error":true,"signature":"sig","opaque":{"item_id":"fc_1","api":"openai-responses"},'
        '"opaque_blobs":{"encrypted":"sha256:03"},"item":"gemini.executableCode","phase":"commentary","image":{"media_type":"image/png","blob_id":"sha256:00","base64":"aGk=",'
        '"revised_prompt":"a cat","prompt":"cat","model":"gpt-image-2","size":"8x8","quality":"low","size_bytes":2,'
        '"width":8,"height":9,"draft":true},"audio":{"media_type":"audio/wav","blob_id":"sha256:04",'
        '"base64":"aGk=","size_bytes":2,"audio_id":"audio_1","expires_at":9},"blob_id":"sha256:01","images":[{"media_type":"image/webp","blob_id":"sha256:02"}],'
        '"cut":true,"provider_extra":[{"name":"citation"}]}',
    ),
    (
        Started(
            **IN_SESSION,
            provider="anthropic",
            model="m",
            metadata={"call": 7},
            fallback=[OTHER],
            notes=["n"],
            participant="Claude",
            parent="r",
        ),
        '{"type":"started",' + SESSION_HEAD + ',"provider":"anthropic","model":"m","metadata":{"call":7},'
        '"fallback":[' + OTHER_JSON + '],"notes":["n"],"participant":"Claude","parent":"r"}',
    ),
    (
        Retrying(**IN_SESSION, error=ERROR, next_attempt=3, delay_ms=500, drop_from=2, continues=True, fallback=OTHER),
        '{"type":"retrying",'
        + SESSION_HEAD
        + ',"error":'
        + ERROR_JSON
        + ',"next_attempt":3,"delay_ms":500,"drop_from":2,'
        '"continues":true,"fallback":' + OTHER_JSON + "}",
    ),
    (
        Restarted(**IN_SESSION, error=ERROR, next_attempt=3, delay_ms=500, drop_from=2),
        '{"type":"restarted",'
        + SESSION_HEAD
        + ',"error":'
        + ERROR_JSON
        + ',"next_attempt":3,"delay_ms":500,"drop_from":2}',
    ),
    (
        Answering(**IN_SESSION, model="m-2", response_id="r1", provider="p"),
        '{"type":"answering",' + SESSION_HEAD + ',"model":"m-2","response_id":"r1","provider":"p"}',
    ),
    (
        Waiting(
            **IN_SESSION,
            **CALL,
            deadline_ms=9,
            on_deadline="allow",
            arguments="{}",
            schema={"type": "object"},
            text="Sure?",
            url="https://example.com",
            tenant="t",
        ),
        '{"type":"waiting",'
        + SESSION_HEAD
        + CALL_JSON
        + ',"deadline_ms":9,"on_deadline":"allow","arguments":"{}","schema":{"type":"object"},"text":"Sure?"'
        + ',"url":"https://example.com","tenant":"t"}',
    ),
    (
        Resumed(
            **IN_SESSION,
            **CALL,
            decision="deny",
            decision_id="d1",
            by="ann",
            door="cli",
            at_ms=5,
            reason="no",
            arguments="{}",
            content="1",
        ),
        '{"type":"resumed",'
        + SESSION_HEAD
        + CALL_JSON
        + ',"decision":"deny","decision_id":"d1","by":"ann","door":"cli","at_ms":5,"reason":"no","arguments":"{}"'
        + ',"content":"1"}',
    ),
    (
        ChildStarted(**IN_SESSION, **OF_CALL, child="r1~2"),
        '{"type":"child_started",' + SESSION_HEAD + ',"block":2,"tool_id":"c1","tool_name":"help","child":"r1~2"}',
    ),
    (
        ChildEnded(**IN_SESSION, **OF_CALL, child="r1~2", status="failed", error=ERROR),
        '{"type":"child_ended",'
        + SESSION_HEAD
        + ',"block":2,"tool_id":"c1","tool_name":"help","child":"r1~2","status":"failed","error":'
        + ERROR_JSON
        + "}",
    ),
    (
        UsageReported(**IN_SESSION, usage=USAGE, total=USAGE, model="m-2", response_id="r1", provider="p"),
        '{"type":"usage",'
        + SESSION_HEAD
        + ',"usage":'
        + USAGE_JSON
        + ',"total":'
        + USAGE_JSON
        + ',"model":"m-2","response_id":"r1","provider":"p"}',
    ),
    (
        Completed(
            **IN_SESSION,
            finish="stop",
            timing=TIMING,
            finish_raw="end_turn",
            usage=USAGE,
            provider="p",
            model="m-2",
            response_id="r1",
            provider_extra=[{"name": "n"}],
            stop_string="END",
        ),
        '{"type":"completed",'
        + SESSION_HEAD
        + ',"finish":"stop","timing":'
        + TIMING_JSON
        + ',"finish_raw":"end_turn","usage":'
        "" + USAGE_JSON + ',"provider":"p","model":"m-2","response_id":"r1","provider_extra":[{"name":"n"}],'
        '"stop_string":"END"}',
    ),
    (
        Incomplete(**IN_SESSION, finish="unknown", timing=TIMING, reason="the stream broke off", error=ERROR),
        '{"type":"incomplete",' + SESSION_HEAD + ',"finish":"unknown","timing":' + TIMING_JSON + ',"reason":'
        '"the stream broke off","error":' + ERROR_JSON + "}",
    ),
    (
        RunFailedEvent(**IN_SESSION, finish="error", timing=TIMING, error=ERROR),
        '{"type":"failed",'
        + SESSION_HEAD
        + ',"finish":"error","timing":'
        + TIMING_JSON
        + ',"error":'
        + ERROR_JSON
        + "}",
    ),
    (
        Cancelled(
            **IN_SESSION, finish="unknown", timing=TIMING, reason="barge-in", heard_through=41, heard_characters=7
        ),
        '{"type":"cancelled",' + SESSION_HEAD + ',"finish":"unknown","timing":' + TIMING_JSON + ',"reason":"barge-in",'
        '"heard_through":41,"heard_characters":7}',
    ),
]

BARE_ERROR = ErrorInfo(code="c", kind="unknown", message="")
BARE_ERROR_JSON = '{"code":"c","class":"unknown","message":""}'
BARE_TIMING = Timing(total_ms=0)

BARE: list[tuple[PublicEvent, str]] = [
    (
        Chunk(**AT, block=0, kind="text", text="Hel", visible=True, depth=0),
        '{"type":"chunk",' + HEAD + ',"block":0,"kind":"text","text":"Hel","visible":true,"depth":0}',
    ),
    (BlockStarted(**AT, block=0, kind="text"), '{"type":"block_start",' + HEAD + ',"block":0,"kind":"text"}'),
    (
        BlockProgress(**AT, block=0, kind="image", status="generating"),
        '{"type":"block_progress",' + HEAD + ',"block":0,"kind":"image","status":"generating"}',
    ),
    (
        ImagePreview(**AT, block=0, kind="image", index=0, image=ImageRef(media_type="image/png")),
        '{"type":"image_preview",' + HEAD + ',"block":0,"kind":"image","index":0,"image":{"media_type":"image/png"}}',
    ),
    (
        ToolProgress(**AT, block=0, tool_id="t1", tool_name="f", progress=0.5),
        '{"type":"tool_progress",' + HEAD + ',"block":0,"tool_id":"t1","tool_name":"f","progress":0.5}',
    ),
    (BlockComplete(**AT, block=0, kind="image"), '{"type":"block_complete",' + HEAD + ',"block":0,"kind":"image"}'),
    (
        BlockComplete(**AT, block=0, kind="text", content=""),
        '{"type":"block_complete",' + HEAD + ',"block":0,"kind":"text","content":""}',
    ),
    (Started(**AT, provider="p", model="m"), '{"type":"started",' + HEAD + ',"provider":"p","model":"m"}'),
    (
        Retrying(**AT, error=BARE_ERROR, next_attempt=3, delay_ms=0, drop_from=0),
        '{"type":"retrying",' + HEAD + ',"error":' + BARE_ERROR_JSON + ',"next_attempt":3,"delay_ms":0,"drop_from":0}',
    ),
    (
        Restarted(**AT, error=BARE_ERROR, next_attempt=3, delay_ms=0, drop_from=0),
        '{"type":"restarted",' + HEAD + ',"error":' + BARE_ERROR_JSON + ',"next_attempt":3,"delay_ms":0,"drop_from":0}',
    ),
    (Answering(**AT), '{"type":"answering",' + HEAD + "}"),
    (Waiting(**AT, **CALL, deadline_ms=9), '{"type":"waiting",' + HEAD + CALL_JSON + ',"deadline_ms":9}'),
    (
        Resumed(**AT, **CALL, decision="allow", decision_id="d1", door="bus", at_ms=5),
        '{"type":"resumed",' + HEAD + CALL_JSON + ',"decision":"allow","decision_id":"d1","door":"bus","at_ms":5}',
    ),
    (
        ChildStarted(**AT, **OF_CALL, child="r1~2"),
        '{"type":"child_started",' + HEAD + ',"block":2,"tool_id":"c1","tool_name":"help","child":"r1~2"}',
    ),
    (
        ChildEnded(**AT, **OF_CALL, child="r1~2", status="lost"),
        '{"type":"child_ended",'
        + HEAD
        + ',"block":2,"tool_id":"c1","tool_name":"help","child":"r1~2","status":"lost"}',
    ),
    (UsageReported(**AT, usage=Usage(), total=Usage()), '{"type":"usage",' + HEAD + ',"usage":{},"total":{}}'),
    (
        Completed(**AT, finish="stop", timing=BARE_TIMING),
        '{"type":"completed",' + HEAD + ',"finish":"stop","timing":{"total_ms":0}}',
    ),
    (
        Incomplete(**AT, finish="unknown", timing=BARE_TIMING, reason=""),
        '{"type":"incomplete",' + HEAD + ',"finish":"unknown","timing":{"total_ms":0},"reason":""}',
    ),
    (
        RunFailedEvent(**AT, finish="error", timing=BARE_TIMING, error=BARE_ERROR),
        '{"type":"failed",' + HEAD + ',"finish":"error","timing":{"total_ms":0},"error":' + BARE_ERROR_JSON + "}",
    ),
    (
        Cancelled(**AT, finish="unknown", timing=BARE_TIMING),
        '{"type":"cancelled",' + HEAD + ',"finish":"unknown","timing":{"total_ms":0}}',
    ),
]

MAPS = ("opaque", "opaque_blobs")
"""Objects whose members are no fields, but names that providers chose."""
KINDS: tuple[type[PublicEvent], ...] = tuple(kind for kind in get_args(PublicEvent) if kind is not UnknownEvent)
"""Those that are written."""


@over_rows(("event", "golden"), FULL + BARE, ids=lambda v: type(v).__name__ if v in KINDS else None)
def test_an_event_is_exactly_its_golden_json_both_ways(event: PublicEvent, golden: str):
    assert encode(event).decode() == golden
    assert decode(golden.encode()) == event


def test_every_event_has_a_golden_form_with_all_fields_set_and_one_with_none():
    assert {type(event) for event, _ in FULL} == {type(event) for event, _ in BARE} == set(KINDS)
    end = {"finish", "timing", "finish_raw", "usage", "provider", "model", "response_id", "provider_extra"}
    for event, golden in FULL:
        unset = set(event.__struct_fields__) - set(json.loads(golden))
        assert not unset - (end if isinstance(event, TERMINAL) else set())
    completed = next(golden for event, golden in FULL if isinstance(event, Completed))
    assert set(json.loads(completed)) == {"type", *Completed.__struct_fields__}


def test_the_terminal_events_are_these_four():
    assert set(TERMINAL) == set(get_args(TerminalEvent)) == {Completed, Incomplete, RunFailedEvent, Cancelled}


@over_rows("kind", KINDS)
def test_no_event_has_a_field_named_data(kind: type[PublicEvent]):
    assert "data" not in kind.__struct_encode_fields__


@over_rows("golden", [golden for _, golden in FULL])
def test_unknown_fields_are_ignored_at_every_level(golden: str):
    def with_news(value: Any) -> Any:
        if isinstance(value, dict):
            fields = {name: inner if name in MAPS else with_news(inner) for name, inner in value.items()}
            return {"later": {"x": 1}} | fields
        return value

    read = decode(json.dumps(with_news(json.loads(golden))).encode())
    plain = msgspec.to_builtins(decode(golden.encode()))
    assert _without(msgspec.to_builtins(read), "later") == plain


def _without(value: Any, name: str) -> Any:
    # Only open maps (metadata, input, raw) keep what they do not know: those are the caller's or the provider's own.
    if isinstance(value, dict):
        return {key: _without(inner, name) for key, inner in value.items() if key != name}
    return value


@over_rows(("event", "golden"), BARE)
def test_each_field_that_is_always_there_is_needed(event: PublicEvent, golden: str):
    always = json.loads(golden)
    required = set(always) - {"content"}
    for name in required:
        with pytest.raises(msgspec.ValidationError):
            decode(json.dumps({key: value for key, value in always.items() if key != name}).encode())


def test_an_event_type_of_a_later_version_is_an_error_that_names_it():
    with pytest.raises(msgspec.ValidationError, match="'novelty'"):
        decode(b'{"type":"novelty","run":"r","seq":0,"turn":0,"attempt":1}')


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
COUNTS = st.integers(min_value=0, max_value=2**53)


@st.composite
def events(draw: st.DrawFn) -> PublicEvent:
    event = draw(st.sampled_from([event for event, _ in FULL + BARE]))
    news: dict[str, Any] = {"run": draw(TEXT), "seq": draw(COUNTS), "turn": draw(COUNTS), "attempt": draw(COUNTS)}
    for name in ("text", "content", "arguments", "signature", "reason", "finish_raw", "provider", "model", "tool_id"):
        if name in event.__struct_fields__:
            news[name] = draw(TEXT)
    return msgspec.structs.replace(event, **news)


@given(events())
def test_the_written_value_is_read_back(event: PublicEvent):
    data = encode(event)
    assert decode(data) == event
    assert json.loads(data)["seq"] == event.seq

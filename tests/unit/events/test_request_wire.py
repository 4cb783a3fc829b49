"""The wire form of requests, letter by letter: what a publisher in any language may rely on."""

from __future__ import annotations

import json

import msgspec
import pytest

from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    Cancel,
    DocumentPart,
    ExtraPart,
    Fallback,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    OutputSchema,
    PrefillOptions,
    Request,
    TextPart,
    Thinking,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    UrlSource,
)

GOLDEN: list[tuple[Request, str]] = [
    (
        Generate(provider="anthropic", model="m", messages=[Message(role="user", content="Hi")]),
        '{"type":"generate","provider":"anthropic","model":"m","messages":[{"role":"user","content":"Hi"}]}',
    ),
    (
        Generate(
            provider="anthropic",
            model="m",
            messages=[
                Message(role="system", content="Be brief."),
                Message(
                    role="user",
                    participant="Ada",
                    content=[
                        TextPart(text="Look", cache=True, opaque={"k": "v"}),
                        ImagePart(source=Base64Source(media_type="image/png", data="aGk="), cache=True),
                        ImagePart(source=UrlSource(url="https://example.org/a.png")),
                        DocumentPart(
                            source=BlobSource(blob_id="sha256:00", media_type="application/pdf", size_bytes=9),
                            title="T",
                        ),
                    ],
                ),
                Message(
                    role="assistant",
                    content=[
                        ThinkingPart(text="hm", signature="s", opaque={"redacted": "x"}),
                        ToolCallPart(tool_id="t1", tool_name="weather", arguments="{}", opaque={"item_id": "i"}),
                        ExtraPart(name="server_tool_use", json="{}"),
                    ],
                ),
                Message(
                    role="tool",
                    content=[
                        ToolResultPart(tool_id="t1", content="sunny", tool_name="weather", is_error=True, cache=True),
                        ToolResultPart(tool_id="t2", content=[TextPart(text="rain")]),
                    ],
                ),
            ],
            id="r1~2",
            parent="r1",
            mode="prefill",
            system=[TextPart(text="You are Ada.")],
            tools=[Tool(name="weather", description="d", parameters={"type": "object"}, strict=True)],
            tool_choice=ToolChoice(name="weather"),
            max_tokens=100,
            temperature=0.5,
            top_p=0.9,
            stop=["END"],
            thinking=Thinking(enabled=False, budget_tokens=1024, effort="low"),
            output_schema=OutputSchema(schema={"type": "object"}, name="city", strict=True),
            stream=False,
            max_tool_depth=3,
            tool_timeout_s=5,
            on_failure="continue",
            deadline_s=60,
            max_added_ms=10,
            durability="replicated",
            participant="Ada",
            metadata={"call": 7},
            extra={"service_tier": "auto"},
            prefill=PrefillOptions(
                delimiter="\n\n",
                end_of_turn="<|eot|>",
                stop_on_end_of_turn=False,
                first_user_message="Go on.",
                names_once=True,
                unnamed=["Narrator"],
            ),
            unsigned_thinking="text",
            names_in_text=True,
            images=ImageOptions(
                size="2K",
                aspect_ratio="16:9",
                quality="low",
                format="webp",
                background="auto",
                model="gpt-image-2",
                count=2,
                previews=3,
                mask=ImagePart(source=BlobSource(blob_id="sha256:00", media_type="image/png")),
                deliver="base64",
            ),
            record=True,
            visible=False,
            commentary="hidden",
            policies=["guard"],
            input_policies=["guard"],
            webhooks=["orders"],
            fallback=[Fallback(provider="openai-chat", model="n", extra={"seed": 1})],
            json_object=True,
            parallel_tool_calls=False,
            seed=-7,
            top_k=40,
            frequency_penalty=0.5,
            presence_penalty=-2,
            user_id="u-1",
            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
        '{"type":"generate","provider":"anthropic","model":"m","messages":['
        '{"role":"system","content":"Be brief."},'
        '{"role":"user","content":[{"type":"text","text":"Look","cache":true,"opaque":{"k":"v"}},'
        '{"type":"image","source":{"type":"base64","media_type":"image/png","data":"aGk="},"cache":true},'
        '{"type":"image","source":{"type":"url","url":"https://example.org/a.png"}},'
        '{"type":"document","source":{"type":"blob","blob_id":"sha256:00","media_type":"application/pdf",'
        '"size_bytes":9},"title":"T"}],"participant":"Ada"},'
        '{"role":"assistant","content":[{"type":"thinking","text":"hm","signature":"s","opaque":{"redacted":"x"}},'
        '{"type":"tool_call","tool_id":"t1","tool_name":"weather","arguments":"{}","opaque":{"item_id":"i"}},'
        '{"type":"extra","name":"server_tool_use","json":"{}"}]},'
        '{"role":"tool","content":[{"type":"tool_result","tool_id":"t1","content":"sunny","tool_name":"weather",'
        '"is_error":true,"cache":true},{"type":"tool_result","tool_id":"t2","content":[{"type":"text","text":"rain"}]}]}],'
        '"id":"r1~2","parent":"r1","mode":"prefill","system":[{"type":"text","text":"You are Ada."}],'
        '"tools":[{"name":"weather","description":"d","parameters":{"type":"object"},"strict":true}],'
        '"tool_choice":{"name":"weather"},"max_tokens":100,"temperature":0.5,"top_p":0.9,"stop":["END"],'
        '"thinking":{"enabled":false,"budget_tokens":1024,"effort":"low"},'
        '"output_schema":{"schema":{"type":"object"},"name":"city","strict":true},"stream":false,"max_tool_depth":3,'
        '"tool_timeout_s":5,"on_failure":"continue","deadline_s":60,"max_added_ms":10,"durability":"replicated",'
        '"participant":"Ada","metadata":{"call":7},'
        '"extra":{"service_tier":"auto"},"prefill":{"delimiter":"\\n\\n","end_of_turn":"<|eot|>",'
        '"stop_on_end_of_turn":false,"first_user_message":"Go on.","names_once":true,"unnamed":["Narrator"]},'
        '"unsigned_thinking":"text","names_in_text":true,'
        '"images":{"size":"2K","aspect_ratio":"16:9","quality":"low",'
        '"format":"webp","background":"auto","model":"gpt-image-2","count":2,"previews":3,"mask":{"type":"image",'
        '"source":{"type":"blob","blob_id":"sha256:00","media_type":"image/png"}},"deliver":"base64"},'
        '"record":true,"visible":false,"commentary":"hidden","policies":["guard"],"input_policies":["guard"],"webhooks":["orders"],'
        '"fallback":[{"provider":"openai-chat","model":"n","extra":{"seed":1}}],'
        '"json_object":true,"parallel_tool_calls":false,"seed":-7,"top_k":40,"frequency_penalty":0.5,'
        '"presence_penalty":-2,"user_id":"u-1",'
        '"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}',
    ),
    (Cancel(run="r1"), '{"type":"cancel","run":"r1"}'),
    (
        Cancel(run="r1", reason="barge-in", heard_through=41, heard_characters=7),
        '{"type":"cancel","run":"r1","reason":"barge-in","heard_through":41,"heard_characters":7}',
    ),
]


@pytest.mark.parametrize(("request_", "golden"), GOLDEN)
def test_a_request_is_exactly_its_golden_json_both_ways(request_: Request, golden: str):
    assert msgspec.json.encode(request_).decode() == golden
    assert msgspec.json.decode(golden, type=Request) == request_


def test_a_golden_form_has_every_field_of_a_request():
    assert set(json.loads(GOLDEN[1][1])) == {"type", *Generate.__struct_fields__}
    assert set(json.loads(GOLDEN[3][1])) == {"type", *Cancel.__struct_fields__}


def test_what_a_bare_request_leaves_out_has_these_defaults():
    bare = msgspec.json.decode(GOLDEN[0][1], type=Generate)
    assert bare.id is None
    assert (bare.mode, bare.stream, bare.on_failure, bare.max_tool_depth) == ("chat", True, "before_first_visible", 10)
    assert (bare.tools, bare.stop, bare.tool_choice, bare.deadline_s) == ([], [], None, None)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "ä", "x" * 65])
def test_a_name_of_an_output_schema_that_an_api_refuses_is_refused(name: str):
    with pytest.raises(msgspec.ValidationError, match=r"\$\.name"):
        msgspec.convert({"schema": {}, "name": name}, OutputSchema)


@pytest.mark.parametrize("golden", [golden for _, golden in GOLDEN])
def test_unknown_fields_of_a_request_are_ignored(golden: str):
    data = json.dumps({**json.loads(golden), "later": {"x": 1}}).encode()
    assert msgspec.json.decode(data, type=Request) == msgspec.json.decode(golden, type=Request)


@pytest.mark.parametrize("bad", ["", "a b", "a\n", "a{0}", "x" * 129, "ä"])
def test_a_run_id_that_is_unsafe_in_a_key_is_refused(bad: str):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"type": "cancel", "run": bad}, Request)


@pytest.mark.parametrize("good", ["a", "0198c0de-0000-7000-8000-000000000000", "user@host:call~7+1=x.y_z", "x" * 128])
def test_a_run_id_that_is_safe_in_a_key_is_taken(good: str):
    assert msgspec.convert({"type": "cancel", "run": good}, Request) == Cancel(run=good)

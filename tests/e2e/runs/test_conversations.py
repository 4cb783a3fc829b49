"""A conversation over several runs and providers, through the running services: every body is one that its provider
takes, and what a provider wants back comes back to it, and to no other."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import BASE_PATHS, PIPELINE, WITH_TOOLS, ended, fleet, provider_table
from tests.e2e.media.test_media import with_store
from tests.e2e.soundness import SOUND
from tests.unit.providers.test_sdk_types import sdk_accepts
from tokenbus import Client, Message, Waiting
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.core.run.state_machine import MAX_PAUSES
from tokenbus.errors import RequestInvalid
from tokenbus_services.mock_provider import MockProvider, Picture, Reply, Script, ToolCall, Turn, Wire
from tokenbus_services.mock_provider.request import ModelRequest
from tokenbus_services.normalizer.image_offload import LARGE_CHARS

MODELS = {
    "anthropic": "claude-sonnet-4-5",
    "openai-chat": "gpt-5",
    "openai-responses": "gpt-5",
    "gemini": "gemini-3-pro-image",
    "gemini-interactions": "gemini-3-pro-image",
}
PNG = b"\x89PNG\r\n\x1a\n"
PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [{"name": "draw", "parameters": PARAMETERS}, {"name": "broken", "parameters": PARAMETERS}]
SAMPLE_TOOLS = """
[tools.draw]
kind = "python"
call = "tests.services.tools.sample_tools:draw"

[tools.broken]
kind = "python"
call = "tests.services.tools.sample_tools:fail"
"""
SIGNED = ("anthropic", "openai-responses", "gemini", "gemini-interactions")
"""The APIs that want something back with thinking."""
PAINTING = ("openai-responses", "gemini", "gemini-interactions")
"""The APIs whose models answer with text and images."""


def signature(api: str) -> str:
    return b64encode(f"signed by {api}".encode()).decode()


def painted(api: str) -> bytes:
    return PNG + f"painted by {api}".encode()


def answer(request: ModelRequest) -> Turn:
    """The model thinks, writes text, returns an image if its API can, and calls two tools; then it summarises."""
    reply = Reply(thinking="Hm, let me think.", signature=signature(request.api), text="Let me look.")
    if request.tool_results:
        return Turn(says=msgspec.structs.replace(reply, text=f"Done by {request.api}."))
    pictures = (Picture(data=painted(request.api)),) if request.api in PAINTING else ()
    calls = (ToolCall(name="draw"), ToolCall(name="broken"))
    return Turn(says=msgspec.structs.replace(reply, pictures=pictures, tool_calls=calls))


def question(order: str, step: int) -> Message:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(PNG).decode()}}
    text = {"type": "text", "text": f"Step {step} of {order}"}
    return msgspec.convert({"role": "user", "content": [text, image] if step == 0 else [text]}, Message)


async def converse(bus: Client, apis: tuple[str, ...]) -> list[dict[str, Any]]:
    """Runs one after the other, each at the next provider; returns the notes at each run's end."""
    order = " > ".join(apis)
    messages: list[Message] = []
    extras: list[dict[str, Any]] = []
    for step, api in enumerate(apis):
        messages.append(question(order, step))
        request: dict[str, Any] = {"provider": api, "model": MODELS[api], "messages": messages, "tools": TOOLS}
        if api in PAINTING:
            request["images"] = {}
        run = await bus.publish({**request, "thinking": {"effort": "low"}, "max_tokens": 4000})
        result = await run.result()
        assert result.text.endswith(f"Done by {api}.")
        messages += await bus.messages(run)
        extras += result.provider_extra
    return extras


def rounds() -> list[tuple[str, ...]]:
    """Four circles in which each API comes after each other one, each begun at two of them, and back to its first."""
    apis = tuple(BASE_PATHS)
    many = len(apis)
    circles = [tuple(apis[n * step % many] for n in range(many)) for step in range(1, many)]
    begins = [(circle, circle.index(apis[n % many])) for at, circle in enumerate(circles) for n in (2 * at, 2 * at + 1)]
    return [(*circle[n:], *circle[:n], circle[n]) for circle, n in begins]


async def test_a_conversation_continues_from_each_of_five_apis_at_each_other_and_back_at_its_first(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    orders = rounds()
    assert {pair for order in orders for pair in pairwise(order)} == set(permutations(BASE_PATHS, 2))
    assert {order[0] for order in orders} == set(BASE_PATHS)
    async with (
        MockProvider(choose=answer, keep=1_000) as provider,
        with_store(tmp_path, server_url, keys, provider.url, SAMPLE_TOOLS) as (services, _),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        await services.start("tools")
        extras = await asyncio.gather(*(converse(bus, order) for order in orders))
        requests = [exchange.request for exchange in provider.requests]
    assert len(requests) == len(orders) * 6 * 2, "no request was refused, and none was made twice"
    for one in requests:
        assert one
        body: Any = msgspec.json.decode(msgspec.json.encode(one.body))
        SOUND[one.api](body)
        sdk_accepts(one.api, body)
        text = msgspec.json.encode(one.body).decode()
        assert not [api for api in SIGNED if api != one.api and signature(api) in text], "of another provider"
        order, step = place_of(text)
        before = order[: step + bool(one.tool_results)]
        assert text.count(b64encode(PNG).decode()) >= 1 + len(before), "the user's image, and each that a tool drew"
        for api in PAINTING:
            assert (b64encode(painted(api)).decode() in text) == (api in before), "an image of a model goes along"
        if step == 5 and one.api in SIGNED:
            assert text.count(signature(one.api)) >= 2, "what the first run signed is back"
    notes = [entry["note"] for extra in extras for entry in extra if "note" in entry]
    assert any("thinking of anthropic was left out" in note for note in notes)
    assert any("the model's images are sent as user images" in note for note in notes)


def place_of(text: str) -> tuple[tuple[str, ...], int]:
    """Which conversation a body is of, and how far that is."""
    step = max(n for n in range(6) if f"Step {n} of " in text)
    order = text.partition(f"Step {step} of ")[2].partition('"')[0].split(" > ")
    return tuple(order), step


async def test_large_encrypted_thinking_is_stored_as_a_blob_and_sent_back(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    large = "e" * (LARGE_CHARS + 1)
    reply = Reply(thinking="Hm.", text="Yes.", signature=large)
    script = Script(name="gpt-5", turns=(Turn(says=reply),), repeat_last=True)
    async with (
        MockProvider([script]) as provider,
        with_store(tmp_path, server_url, keys, provider.url),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        request = {"provider": "openai-responses", "model": "gpt-5", "messages": [question("large", 1)]}
        first = await (await bus.publish(request)).result()
        thinking, text = first.blocks
        assert thinking.opaque_blobs
        assert list(thinking.opaque_blobs) == ["encrypted"]
        assert large not in msgspec.json.encode(first.blocks).decode()
        assert text.opaque
        stored: Any = msgspec.to_builtins(first.messages)  # as a transcript store would keep them
        messages = [question("large", 1), *stored, question("large", 2)]
        second = await (await bus.publish({**request, "messages": messages})).result()
        assert second.provider_extra == []
        [_, again] = [exchange.request for exchange in provider.requests]
    assert again
    reasoning = [item for item in again.body["input"] if item.get("type") == "reasoning"]
    assert [item["encrypted_content"] for item in reasoning] == [large]


async def test_a_gif_of_a_tool_and_what_a_vendor_does_not_take_end_no_run(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    gif = '\n[tools.gif]\nkind = "python"\ncall = "tests.services.tools.sample_tools:draw_gif"\n'
    tool = {"name": "gif", "parameters": PARAMETERS}
    calls = Reply(text="Look:", tool_calls=(ToolCall(name="gif"),))
    script = Script(name="gif", turns=(Turn(says=calls), Turn(says=Reply(text="Nice."))))
    async with MockProvider([script]) as provider:
        tables = "".join(
            provider_table(f"{api}-blind", api, provider.url, "media = { image_types = [] }") for api in BASE_PATHS
        )
        async with fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, gif + tables):
            left_out = ["gemini", *(f"{api}-blind" for api in BASE_PATHS)]
            taken = [api for api in BASE_PATHS if api != "gemini"]
            runs = {name: await send("gif", f"hello {name}", provider=name, tools=[tool]) for name in left_out + taken}
            logs: Any = await ended(server.client, keys, list(runs.values()))
            bodies = [exchange.http_request.body.decode() for exchange in provider.requests]
    for name, run in runs.items():
        end = logs[run][-1]
        assert end["type"] == "completed", end
        notes = [extra["note"] for extra in end.get("provider_extra", ()) if "note" in extra]
        [second] = [body for body in bodies if f'hello {name}"' in body and "image/gif" in body and "Look:" in body]
        if name in left_out:
            assert ["the image was left out" in note for note in notes] == [True]
            assert "an image is left out here" in second
            assert GIF not in second
        else:
            assert notes == []
            assert GIF in second


GIF = b64encode(b"GIF89a").decode()


async def test_repeated_tool_ids_names_and_odd_media_types_reach_each_provider_in_a_form_that_it_takes(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    kimi = "functions.weather:0"
    image = {"type": "image", "source": {"type": "base64", "media_type": "IMAGE/JPG;q=1", "data": "AAAA"}}
    call = {"type": "tool_call", "tool_id": kimi, "tool_name": "weather", "arguments": "{}"}
    result = {"type": "tool_result", "tool_id": kimi, "content": "rain"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "tool", "content": [result]}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, image], "participant": "Ann Lee"},
        {"role": "user", "content": "Well?", "participant": "Bob"},
        *turns,
        *turns,
        {"role": "user", "content": "So?"},
    ]
    script = Script(name="claude-sonnet-4-6", turns=(Turn(says=Reply(text="Yes.")),), repeat_last=True)
    async with deployed([script], WITH_TOOLS[:3]) as (provider, _):
        plain = [await send(script.name, provider=api, messages=messages) for api in BASE_PATHS]
        named = [await send(script.name, provider=api, messages=messages, names_in_text=True) for api in BASE_PATHS]
        logs: Any = await ended(server.client, keys, [*plain, *named])
        requests = [exchange.request for exchange in provider.requests]
    assert len(requests) == 2 * len(BASE_PATHS)
    for one in requests:
        assert one
        body: Any = msgspec.json.decode(msgspec.json.encode(one.body))
        if one.api == "gemini":  # its calls have no signature, for the model of this name needs none here
            continue
        SOUND[one.api](body)
        sdk_accepts(one.api, body)
        assert "image/jpeg" in str(body)
    for run, api in zip(plain, BASE_PATHS, strict=True):
        notes = " ".join(extra.get("note", "") for extra in logs[run][-1]["provider_extra"])
        assert "'IMAGE/JPG;q=1' is sent as 'image/jpeg'" in notes
        assert ("is already used by an earlier call" in notes) == (
            api in ("anthropic", "openai-responses", "gemini-interactions")
        )
        dropped = "messages[0], messages[1]: this API has no field for participant names"
        fitted = "messages[0]: the participant 'Ann Lee' is sent as 'Ann_Lee'"
        assert (fitted if api == "openai-chat" else dropped) in notes
    bodies = [msgspec.json.encode(one.body).decode() for one in requests if one]
    assert sum('"Ann Lee: Look"' in body and '"Bob: Well?"' in body for body in bodies) == len(BASE_PATHS)
    assert sum('"name":"Ann_Lee"' in body for body in bodies) == 1


async def test_broken_base64_is_refused_with_its_place_large_or_small(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    broken = ["", "data:image/png;base64,AAAA", "A", "A" * 300_001, "data:image/png;base64," + "A" * 300_000]
    async with deployed([], WITH_TOOLS[:3]) as (provider, _):
        runs: list[str] = []
        for data in broken:
            source = {"type": "base64", "media_type": "image/png", "data": data}
            content = [{"type": "text", "text": "Look"}, {"type": "image", "source": source}]
            runs += [
                await send("m", provider=api, messages=[{"role": "user", "content": content}]) for api in BASE_PATHS
            ]
        logs: Any = await ended(server.client, keys, runs)
        assert len(provider.requests) == 0
    for run in runs:
        [end] = logs[run]
        assert (end["type"], end["error"]["where"]) == ("failed", "messages[0].content[1].source.data")


def answer_in_container(stop: str, *blocks: dict[str, Any], container: str = "container_1") -> Wire:
    """An answer of the Messages API whose code ran in a container, streamed and whole."""
    message = {"type": "message", "id": "msg_1", "role": "assistant", "model": "coder", "content": []}
    usage = {"input_tokens": 1, "output_tokens": 1}
    ends = {"stop_reason": stop, "container": {"id": container, "expires_at": "2030-01-01T00:00:00Z"}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {**message, "usage": usage}}]
    for index, block in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events.append({"type": "content_block_stop", "index": index})
    events += [{"type": "message_delta", "delta": ends, "usage": usage}, {"type": "message_stop"}]
    stream = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)
    body = {**message, "content": list(blocks), **ends, "usage": usage}
    return Wire(stream=stream, body=json.dumps(body).encode())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_container_goes_back_in_each_turn_and_in_the_next_run(
    server: Server, server_url: str, keys: Keys, send: Send, stream: bool, deployed: Deploy
) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    said = {"type": "text", "text": "Rain."}
    coder = Script(
        name="coder",
        turns=(
            Turn(says=answer_in_container("tool_use", call)),
            Turn(says=answer_in_container("end_turn", said, container="container_2")),
        ),
        repeat_last=True,
    )
    plain = Script(name="plain", turns=(Turn(says=Reply(text="Yes.")),), repeat_last=True)
    async with deployed([coder, plain], WITH_TOOLS) as (provider, _), Client(server_url, prefix=keys.prefix) as bus:
        run = await send("coder", tools=[WEATHER], stream=stream)
        log: Any = (await ended(server.client, keys, [run]))[run]
        assert log[-1]["type"] == "completed", log[-1]
        history = [{"role": "user", "content": "hello"}, *msgspec.to_builtins(await bus.messages(run))]
        history.append({"role": "user", "content": "And now?"})
        next_run = await send("coder", messages=history, stream=stream)
        other = await send("plain", provider="gemini", messages=history)
        logs: Any = await ended(server.client, keys, [next_run, other])
        bodies = [json.loads(exchange.http_request.body) for exchange in provider.requests]
    *own, foreign = sorted(bodies, key=lambda body: "contents" in body)
    assert [body.get("container") for body in own] == [None, "container_1", "container_2"]
    assert all("container" not in json.dumps(body["messages"]) for body in own)
    assert "container" not in json.dumps(foreign)
    assert "an item of anthropic (anthropic.container) was left out" in json.dumps(logs[other][-1]["provider_extra"])


@pytest.mark.parametrize("stream", [True, False])
async def test_in_a_conversation_that_the_provider_keeps_nothing_is_sent_twice(
    server: Server, keys: Keys, send: Send, stream: bool, deployed: Deploy
) -> None:
    call = ToolCall(name="weather", arguments={"city": "Bern"})
    turns = (Turn(says=Reply(text="Let me see.", tool_calls=(call,))), Turn(says=Reply(text="Rain.")))
    async with deployed([Script(name="kept", turns=turns)], WITH_TOOLS) as (provider, _):
        more = {"extra": {"conversation": "conv_1"}, "tools": [WEATHER], "stream": stream, "max_tool_depth": 1}
        run = await send("kept", provider="openai-responses", **more)
        log: Any = (await ended(server.client, keys, [run]))[run]
        first, second = (json.loads(exchange.http_request.body) for exchange in provider.requests[:2])
    assert log[0]["type"] == "started", log
    assert [item["role"] for item in first["input"]] == ["user"]
    assert [item["type"] for item in second["input"]] == ["function_call_output"]
    assert (first["conversation"], second["conversation"], first["store"]) == ("conv_1", "conv_1", True)


@pytest.mark.parametrize("stream", [True, False])
async def test_after_a_previous_response_each_turn_sends_what_is_new_since_it(
    server: Server, keys: Keys, send: Send, stream: bool, deployed: Deploy
) -> None:
    call = ToolCall(name="weather", arguments={"city": "Bern"})
    turns = (Turn(says=Reply(text="Let me see.", tool_calls=(call,))), Turn(says=Reply(text="Rain.")))
    scripts = [Script(name="before", turns=(Turn(says=Reply(text="Hello.")),)), Script(name="after", turns=turns)]
    async with deployed(scripts, WITH_TOOLS) as (provider, _):
        more: dict[str, Any] = {"provider": "openai-responses", "stream": stream}
        before = await send("before", **more, extra={"store": True})
        log: Any = (await ended(server.client, keys, [before]))[before]
        [previous] = [event["response_id"] for event in log if event["type"] == "answering"]
        kept = {"store": True, "previous_response_id": previous}
        run = await send("after", **more, extra=kept, tools=[WEATHER], max_tool_depth=1)
        log = (await ended(server.client, keys, [run]))[run]
        bodies = [json.loads(exchange.http_request.body) for exchange in provider.requests]
    assert log[-1]["type"] == "completed", log
    assert [body.get("previous_response_id") for body in bodies] == [None, previous, previous]
    kinds = [[item.get("role") or item["type"] for item in body["input"]] for body in bodies[1:]]
    assert kinds == [["user"], ["user", "assistant", "function_call", "function_call_output"]]
    assert "Hello." not in json.dumps(bodies[1:]), "the provider has it"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_stops_at_its_compaction_is_continued_from_it(
    server: Server, keys: Keys, send: Send, stream: bool, deployed: Deploy
) -> None:
    compaction = {"type": "compaction", "content": "So far: Bern."}
    says = answer_in_container("compaction", compaction)
    async with deployed([Script(name="compacts", turns=(Turn(says=says),), repeat_last=True)], PIPELINE) as (
        provider,
        _,
    ):
        run = await send("compacts", stream=stream)
        log: Any = (await ended(server.client, keys, [run]))[run]
        bodies = [json.loads(exchange.http_request.body) for exchange in provider.requests]
    assert (log[-1]["finish"], log[-1]["finish_raw"]) == ("pause", "compaction"), "asked a bounded number of times"
    assert len(bodies) == MAX_PAUSES + 1
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant"]
    assert bodies[1]["messages"][-1]["content"] == [compaction]
    assert bodies[1]["container"] == "container_1"


@pytest.mark.parametrize(("allow", "stream"), [(True, True), (False, True), (True, False)])
async def test_a_run_waits_for_leave_for_a_hosted_call_and_the_decision_goes_back_to_its_provider(
    server: Server, server_url: str, keys: Keys, send: Send, allow: bool, stream: bool, deployed: Deploy
) -> None:
    asked = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "s", "name": "del", "arguments": "{}"}
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"}
    whole = {"object": "response", "id": "resp_1", "model": "asks", "status": "completed", "output": [asked, call]}
    begun = {**whole, "status": "in_progress", "output": []}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate((asked, call)):
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": whole})
    sse = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    says = Wire(stream=sse, body=json.dumps(whole).encode())
    async with (
        deployed([Script(name="asks", turns=(Turn(says=says), Turn(says=Reply(text="done"))))], WITH_TOOLS) as (
            provider,
            _,
        ),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        run = await send("asks", provider="openai-responses", stream=stream, tools=[WEATHER])
        async for event in bus.follow(run, wait_s=30):
            if isinstance(event, Waiting):
                break
        (info,) = [info async for info in bus.waiting(run=run)]
        assert (info.what, info.tool_name, info.tool_id, info.text) == ("approval", "del", "mcpr_1", "MCP server: s")
        assert info.arguments == "{}"
        with pytest.raises(RequestInvalid, match="nobody can change"):
            await bus.approve(run, info.wait, arguments={"n": 1})
        await (bus.approve(run, info.wait, by="ann") if allow else bus.deny(run, info.wait, "no", by="ann"))
        log: Any = (await ended(server.client, keys, [run]))[run]
        bodies = [json.loads(exchange.http_request.body) for exchange in provider.requests]
        messages = msgspec.to_builtins(await bus.messages(run))
        again = await send("asks", provider="openai-responses", messages=[{"role": "user", "content": "x"}, *messages])
        await ended(server.client, keys, [again])
        repeated = json.loads(provider.requests[-1].http_request.body)["input"]
    assert (log[-1]["type"], log[-1]["finish"]) == ("completed", "stop")
    assert len(bodies) == 2
    items = bodies[1]["input"]
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": allow}
    answer |= {} if allow else {"reason": "no"}
    for sent in (items, repeated):
        assert [item for item in sent if str(item.get("type")).startswith("mcp")] == [asked, answer]
    assert {item["call_id"] for item in items if item.get("type") == "function_call_output"} == {"c1"}

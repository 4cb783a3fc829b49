"""Output formats of requests through the running services, for every provider's capabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import BASE_PATHS, PIPELINE, WITH_TOOLS, ended, fleet, provider_table
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.requests import Generate, Message
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, ToolCall, Turn, Wire

CITIES = ("Rome", "Oslo")
THREE_TURNS = Script(
    name="three",
    turns=(
        Turn(
            says=Reply(
                text="Let me look.",
                tool_calls=tuple(ToolCall(name="weather", arguments={"city": city}) for city in CITIES),
            )
        ),
        Turn(says=Reply(text="One more.", tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),))),
        Turn(says=Reply(text="It is fine: {tool_result}")),
    ),
)
THOUGHT, SIGNATURE = 'Which city? \n"Bern", é.', "c2lnbmVkIGhlcmU="
SIGNED = Script(
    name="signed",
    turns=(
        Turn(
            says=Reply(
                thinking=THOUGHT,
                signature=SIGNATURE,
                text="Let me look.",
                tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),),
            )
        ),
        Turn(says=Reply(text="Fair.")),
    ),
)
REPLY = "One. EN two. END of it"
ENDLESS = Script(name="endless", turns=(Turn(says=Reply(text=REPLY, chunk_size=2), fault=Stall(after_text=" o")),))
"""It falls silent after the stop string, and its answer never ends by itself."""
WHOLE = Script(name="whole", turns=(Turn(says=Reply(text=REPLY)),), repeat_last=True)
HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello")),), repeat_last=True)
R1 = Script(name="r1-big", turns=(Turn(says=Reply(text="Hm.</think>Yes.", chunk_size=3)),), repeat_last=True)
INSTRUCT = Script(name="instruct", turns=(Turn(says=Reply(text="Yes.", chunk_size=2)),), repeat_last=True)
TAGS = """
[providers.NAME.quirks.models."r1-"]
inline_thinking = ["think"]
inline_thinking_opened = true

[providers.NAME.quirks.models.instruct]
inline_thinking = ["think"]
inline_thinking_opened = true
unclosed_thinking = "release"
"""


async def visible(server: Server, keys: Keys, run: str) -> list[dict[str, Any]]:
    """What a subscriber of `visible` reads of the run, in order."""
    entries = await server.client.xrange(keys.topic(keys.partition_of(run), "visible"))
    events = [json.loads(fields[b"__data__"]) for _, fields in entries]
    return [event for event in events if event["run"] == run]


async def test_three_turns_with_parallel_tools_in_chat_are_the_same_for_each_api(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([THREE_TURNS], WITH_TOOLS):
        runs = [
            await send("three", provider=api, tools=[WEATHER], stream=stream)
            for api in BASE_PATHS
            for stream in (True, False)
        ]
        logs: Any = await ended(server.client, keys, runs)
        received = {run: await visible(server, keys, run) for run in runs}
    kinds = ["text", "tool_call", "tool_call", "tool_result", "tool_result", "text", "tool_call", "tool_result", "text"]
    for run in runs:
        judge.check(logs[run])
        assert judge.blocks(logs[run]) == judge.blocks(logs[runs[0]])
        assert [kind for kind, _ in judge.blocks(logs[run])] == kinds
        assert logs[run][-1]["turn"] == 2
        assert "".join(event["text"] for event in received[run]) == judge.text(logs[run])
        assert {event["kind"] for event in received[run]} == {"text"}


async def test_signed_thinking_is_sent_back_unchanged_with_the_next_turn(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([SIGNED], WITH_TOOLS) as (provider, _):
        runs = [await send("signed", provider=api, tools=[WEATHER], id=api) for api in BASE_PATHS]
        logs: Any = await ended(server.client, keys, runs)
        requests = {e.request.api: e.request.body for e in provider.requests if e.request and e.request.turn}
    assert {logs[run][-1]["type"] for run in runs} == {"completed"}
    assert requests["anthropic"]["messages"][1]["content"][0] == {
        "type": "thinking",
        "thinking": THOUGHT,
        "signature": SIGNATURE,
    }
    [reasoning] = [item for item in requests["openai-responses"]["input"] if item.get("type") == "reasoning"]
    assert (reasoning["encrypted_content"], reasoning["summary"][0]["text"]) == (SIGNATURE, THOUGHT)
    [call] = [part for part in requests["gemini"]["contents"][1]["parts"] if "functionCall" in part]
    assert call["thoughtSignature"] == SIGNATURE
    assert SIGNATURE not in json.dumps(requests["openai-chat"]), "it has no place for one"


async def test_a_stop_string_ends_the_turn_whether_its_provider_supports_it_or_not(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider([ENDLESS, WHOLE]) as provider:
        patient = "".join(provider_table(f"{api}-p", api, provider.url, "idle_timeout_s = 3600") for api in BASE_PATHS)
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, patient):
            stops = ["A", "B", "C", "D", "E.", "END"]  # more than most providers take, and Responses takes none
            endless = [await send("endless", provider=f"{api}-p", stop=stops) for api in BASE_PATHS]
            whole = [await send("whole", provider=api, stop=stops, stream=False) for api in BASE_PATHS]
            logs: Any = await ended(server.client, keys, [*endless, *whole])
            waiting = [e for e in provider.requests if e.request and e.request.model == "endless"]
            for exchange in waiting:
                await provider.disconnected(exchange)
    assert len(waiting) == len(BASE_PATHS)
    for log in logs.values():
        judge.check(log)
        assert judge.blocks(log) == [("text", "One. EN two. ")]
        assert (log[-1]["type"], log[-1]["finish"], log[-1]["stop_string"]) == ("completed", "stop", "END")


async def test_thinking_of_another_model_is_left_out_or_becomes_text_as_the_request_sets(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    messages = [
        {"role": "user", "content": "Is it raining?"},
        {"role": "assistant", "content": [{"type": "thinking", "text": "Hm."}, {"type": "text", "text": "Yes."}]},
        {"role": "user", "content": "Still?"},
    ]
    async with deployed([HELLO], PIPELINE) as (provider, _):
        for convert in (False, True):
            how: dict[str, Any] = {"messages": messages, "unsigned_thinking": "text" if convert else "drop"}
            runs = [await send("hello", provider=api, **how) for api in BASE_PATHS]
            logs: Any = await ended(server.client, keys, runs)
            for run in runs:
                assert logs[run][-1]["type"] == "completed"
                [note] = [extra for extra in logs[run][-1]["provider_extra"] if "note" in extra]
                done = "thinking without a signature was turned into text" if convert else "thinking was left out"
                assert note["note"].startswith(f"messages[1]: {done}")
        bodies = [exchange.http_request.body for exchange in provider.requests]
    assert [b"Hm." in body for body in bodies] == [False] * len(BASE_PATHS) + [True] * len(BASE_PATHS)
    assert all(b"<thinking>Hm.</thinking>" in body for body in bodies[len(BASE_PATHS) :])


async def test_the_tags_of_a_model_count_in_chat_and_in_prefill(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider([R1, INSTRUCT]) as provider:
        toml = "".join(
            provider_table(f"{api}-local", api, provider.url) + TAGS.replace("NAME", f"{api}-local")
            for api in BASE_PATHS
        )
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml):
            thought = [await send("r1-big", provider=f"{api}-local") for api in BASE_PATHS]
            plain = [await send("instruct", provider=f"{api}-local") for api in BASE_PATHS]
            prefilled = await send("r1-big", provider="anthropic-local", mode="prefill", participant="Claude")
            logs: Any = await ended(server.client, keys, [*thought, *plain, prefilled])
    for run in thought:
        judge.check(logs[run])
        assert judge.blocks(logs[run]) == [("thinking", "Hm."), ("text", "Yes.")]
    for run in plain:
        judge.check(logs[run])
        assert judge.blocks(logs[run]) == [("text", "Yes.")], "the tag was never closed, for there was no thinking"
    assert judge.blocks(logs[prefilled]) == [("text", "Hm.Yes.")], "a stray close is as if not written"


def _phases() -> bytes:
    """A stream of the Responses API: commentary, then a call; or the final answer."""
    created = {"id": "resp_1", "model": "gpt-5.3-codex", "status": "in_progress", "output": []}
    items: list[dict[str, Any]] = []
    for number, (phase, text) in enumerate((("commentary", "I look first."), ("final_answer", "It rains."))):
        part = {"type": "output_text", "text": text, "annotations": []}
        head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "phase": phase}
        items.append({**head, "status": "completed", "content": [part]})
    events: list[dict[str, Any]] = [{"type": "response.created", "response": created}]
    for index, item in enumerate(items):
        at = {"output_index": index, "item_id": item["id"]}
        text = item["content"][0]["text"]
        events += [
            {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}},
            {"type": "response.output_text.delta", **at, "content_index": 0, "delta": text},
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
    events.append({"type": "response.completed", "response": {**created, "status": "completed", "output": items}})
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)


async def test_commentary_is_named_by_its_block_visible_if_the_request_says_so_and_goes_back_with_its_phase(
    server: Server, server_url: str, keys: Keys, send: Send, deployed: Deploy
) -> None:
    script = Script(name="codex", turns=(Turn(says=Wire(stream=_phases())),) * 9)
    toml = '[policies.watch]\nuse = "tokenbus.policy:RedactSecrets"\n'
    async with (
        deployed([script], [*PIPELINE, "policy"], toml) as (provider, _),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        runs = {
            (commentary, policies): await send(
                "codex", provider="openai-responses", commentary=commentary, policies=policies.split()
            )
            for commentary in ("visible", "hidden")
            for policies in ("", "watch")
        }
        logs: Any = await ended(server.client, keys, list(runs.values()))
        for (commentary, policies), run in runs.items():
            log = logs[run]
            judge.check(log)
            assert [event.get("phase") for event in log if event["type"] == "block_start"] == _PHASES, policies
            assert [event.get("phase") for event in log if event["type"] == "block_complete"] == _PHASES, policies
            spoken = "".join(event["text"] for event in log if event["type"] == "chunk" and event["visible"])
            assert spoken == ("It rains." if commentary == "hidden" else "I look first.It rains."), policies
            back = await bus.messages(run)
            await bus.result(await bus.publish(_more("codex", back)))
            sent = json.loads(provider.requests[-1].http_request.body)
            assert [item["phase"] for item in sent["input"] if item.get("role") == "assistant"] == _PHASES


_PHASES = ["commentary", "final_answer"]


def _more(model: str, back: list[Message]) -> Generate:
    messages = [Message(role="user", content="hello"), *back, Message(role="user", content="and now?")]
    return Generate(provider="openai-responses", model=model, messages=messages)

"""Which script and which turn a request gets: read from the request alone, so that parallel runs are independent."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.services.mock_provider.requests import (
    CHAT,
    EVENTS,
    GEMINI,
    MESSAGES,
    PATHS,
    RESPONSES,
    one_message,
    one_turn,
    post,
    serving,
)
from tokenbus_services.mock_provider import MockProvider, ModelRequest, Reply, Script, ToolCall, Turn, Wire
from tokenbus_services.mock_provider.reply import Finish

TURNS = Script(
    name="one-turn",
    turns=tuple(Turn(says=Wire(stream=b"data: %d\n\n" % number, body=b"%d" % number)) for number in range(3)),
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]}
CHAT_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
}
CHAT_RESULT = {"role": "tool", "tool_call_id": "t1", "content": "rain"}


@pytest.mark.parametrize(
    ("path", "messages", "turn"),
    [
        (MESSAGES, [_user("a")], 0),
        (MESSAGES, [_user("a"), _assistant("b"), _user("c")], 1),
        (MESSAGES, [_user("a"), _assistant("a prefill")], 0),
        (MESSAGES, [_user("a"), CALL, RESULT], 1),
        (MESSAGES, [_user("a"), CALL, RESULT, _assistant("a prefill")], 1),
        (MESSAGES, [_user("a"), CALL, RESULT, _assistant("b"), _user("c")], 2),
        (CHAT, [{"role": "system", "content": "be kind"}, _user("a")], 0),
        (CHAT, [_user("a"), CHAT_CALL, CHAT_RESULT], 1),
        (CHAT, [_user("a"), CHAT_CALL, CHAT_RESULT, _assistant("b"), {"role": "developer", "content": "x"}], 1),
        (CHAT, [_user("a"), _assistant("b"), _user("c"), CHAT_CALL, CHAT_RESULT], 2),
    ],
)
async def test_the_turn_follows_from_the_history(path: str, messages: list[dict[str, Any]], turn: int) -> None:
    async with serving(TURNS) as (server, client):
        assert (await client.post(path, json=one_message(messages=messages))).content == b"data: %d\n\n" % turn
    request = server.requests[0].request
    assert request is not None
    assert request.turn == turn


async def test_the_turn_follows_from_the_items_of_a_responses_request() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "umbrella today?"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "sun"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
    ]
    async with serving(TURNS) as (server, client):
        response = await client.post(RESPONSES, json={"model": "one-turn", "stream": True, "input": items})
    assert response.content == b"data: 1\n\n"
    request = server.requests[0].request
    assert request is not None
    assert (request.token, request.tool_results) == ("today?", ("sun", "rain"))


async def test_the_turn_follows_from_the_contents_of_a_gemini_request() -> None:
    contents = [
        {"role": "user", "parts": [{"text": "umbrella today?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"sky": "rain"}}}]},
    ]
    async with serving(TURNS) as (server, client):
        response = await client.post(GEMINI + "?alt=sse", json={"contents": contents})
    assert response.content == b"data: 1\n\n"
    request = server.requests[0].request
    assert request is not None
    assert (request.token, request.tool_results) == ("today?", ('{"sky":"rain"}',))


@pytest.mark.parametrize(
    ("path", "messages", "problem"),
    [
        (MESSAGES, [_user("a"), CALL, _user("never mind")], "t1"),
        (MESSAGES, [_user("a"), RESULT], "t1"),
        (CHAT, [_user("a"), CHAT_CALL, _user("never mind")], "t1"),
        (CHAT, [_user("a"), CHAT_CALL, CHAT_RESULT, CHAT_RESULT], "t1"),
    ],
)
async def test_a_history_that_lost_a_call_or_a_result_is_refused(
    path: str, messages: list[dict[str, Any]], problem: str
) -> None:
    async with serving(TURNS) as (_, client):
        response = await client.post(path, json=one_message(messages=messages))
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (MESSAGES, {**one_message(), "max_tokens": None}, "max_tokens"),
        (MESSAGES, {**one_message(), "messages": []}, "messages"),
        (MESSAGES, {**one_message(), "messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [_user("a")]}, "model"),
        (GEMINI, {"contents": [{"parts": [{"text": "a"}]}]}, "alt"),
        (GEMINI + "?alt=sse", {}, "contents"),
        (MESSAGES, one_message(model="unknown"), "unknown"),
        ("/v1/complete", one_message(), "/v1/complete"),
    ],
)
async def test_what_the_api_would_refuse_is_refused_by_name(path: str, body: dict[str, Any], problem: str) -> None:
    async with serving(TURNS) as (server, client):
        response = await client.post(path, json=body)
    assert response.status_code in {400, 404}
    assert problem in response.json()["error"]["message"]
    assert server.requests[0].http_request.path == path.partition("?")[0]


async def test_a_body_that_is_no_json_object_is_refused() -> None:
    async with serving(TURNS) as (_, client):
        for content in (b"", b"[]", b"{"):
            response = await client.post(CHAT, content=content)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_past_its_last_turn_a_script_refuses_or_repeats_as_it_says() -> None:
    messages = [_user("a"), *[_assistant("b"), _user("c")] * 5]
    repeating = Script(name="again", turns=TURNS.turns, repeat_last=True)
    async with serving(TURNS, repeating) as (_, client):
        assert (await client.post(CHAT, json=one_message(messages=messages))).status_code == 400
        response = await client.post(CHAT, json=one_message(messages=messages, model="again"))
        assert response.content == b"data: 2\n\n"


async def test_a_chooser_sees_the_request_and_picks_a_script_a_turn_or_nothing() -> None:
    def choose(request: ModelRequest) -> Script | Turn | None:
        match request.headers.get("x-case"):
            case "script":
                return TURNS
            case "turn":
                return Turn(says=Wire(stream=b"data: %b\n\n" % request.body["stop"].encode()))
            case _:
                return None

    async with serving(one_turn(), choose=choose) as (_, client):

        async def ask(case: str) -> bytes:
            return (await client.post(CHAT, json=one_message(stop="here"), headers={"x-case": case})).content

        assert [await ask("script"), await ask("turn"), await ask("none")] == [
            b"data: 0\n\n",
            b"data: here\n\n",
            EVENTS,
        ]


async def test_an_error_in_a_chooser_is_raised_when_the_server_ends() -> None:
    def choose(request: ModelRequest) -> None:
        raise LookupError("no idea")

    with pytest.raises(LookupError, match="no idea"):  # noqa: PT012
        async with serving(choose=choose) as (_, client):
            response = await client.post(CHAT, json=one_message())
            assert (response.status_code, "no idea" in response.text) == (500, True)


async def test_parallel_runs_of_one_script_say_their_own_things() -> None:
    reply = Reply(text="{token} says hello to {token}", tool_calls=(ToolCall(name="say", arguments={"to": "{token}"}),))
    async with serving(one_turn(reply)) as (_, client):

        async def run(token: str) -> bool:
            body = (await client.post(CHAT, json=one_message(f"my name is {token}", stream=False))).json()
            message = body["choices"][0]["message"]
            expected = reply.with_marks_filled(token=token)
            called = message["tool_calls"][0]["function"]["arguments"]
            return (message["content"], called) == (expected.text, expected.tool_calls[0].raw)

        assert all(await asyncio.gather(*(run(f'run-{n}"ü') for n in range(20))))


@pytest.mark.parametrize(("path", "call", "result"), [(MESSAGES, CALL, RESULT), (CHAT, CHAT_CALL, CHAT_RESULT)])
async def test_a_reply_can_quote_the_tools_results(path: str, call: dict[str, Any], result: dict[str, Any]) -> None:
    script = Script(
        name="one-turn", turns=(Turn(says=Reply(text="first")), Turn(says=Reply(text="There is {tool_result}.")))
    )
    async with serving(script) as (_, client):
        body = one_message(messages=[_user("a"), call, result], stream=False)
        assert "There is rain." in (await client.post(path, json=body)).text


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_tool_ids_differ_between_turns_and_runs_and_not_between_tries(path: str) -> None:
    reply = Reply(tool_calls=(ToolCall(name="a"), ToolCall(name="b")))
    script = Script(name="one-turn", turns=(Turn(says=reply),), repeat_last=True)
    histories = [[_user("a")], [_user("b")], [_user("a"), _assistant("x"), _user("a")]]
    async with serving(script) as (_, client):
        ids: list[str] = []
        for messages in histories:
            answers = [
                (await client.post(path, json=one_message(messages=messages, stream=False))).json() for _ in range(2)
            ]
            assert answers[0] == answers[1]
            ids += _ids(answers[0])
    assert len(set(ids)) == len(ids) == 6


@pytest.mark.parametrize(("path", "name"), [(RESPONSES, "call_id"), (GEMINI, "id")])
async def test_tool_ids_of_responses_and_gemini_differ_between_runs_and_not_between_tries(path: str, name: str) -> None:
    pattern = re.compile(rf'"{name}": ?"([^"]+)"')
    async with serving(one_turn(Reply(tool_calls=(ToolCall(name="a"), ToolCall(name="b"))))) as (_, client):
        ids: list[str] = []
        for text in ("a", "b"):
            answers = [(await client.post(**post(path, text, stream=False))).text for _ in range(2)]
            assert answers[0] == answers[1]
            ids += pattern.findall(answers[0])
    assert len(set(ids)) == len(ids) == 4


ENDINGS: list[tuple[Finish, tuple[str, str, str, str, str]]] = [
    ("stop", ("end_turn", "stop", "completed", "STOP", "completed")),
    ("length", ("max_tokens", "length", "max_output_tokens", "MAX_TOKENS", "incomplete")),
    ("content_filter", ("refusal", "content_filter", "content_filter", "SAFETY", "safety")),
]


@pytest.mark.parametrize(("finish", "words"), ENDINGS)
async def test_the_finish_reason_uses_the_words_of_each_api(finish: Finish, words: tuple[str, ...]) -> None:
    async with serving(one_turn(Reply(text="hello", finish=finish))) as (_, client):
        for path, word in zip(PATHS, words, strict=True):
            for stream in (True, False):
                assert f'"{word}"' in (await client.post(**post(path, stream=stream))).text


async def test_the_records_hold_what_was_sent_and_are_bounded() -> None:
    async with serving(one_turn(), keep=3) as (server, client):
        for number in range(5):
            await client.post(MESSAGES, json=one_message(f"number {number}"), headers={"X-Api-Key": f"key {number}"})
        latest = await server.requested(5)
    kept = server.requests
    assert [exchange.http_request.headers["x-api-key"] for exchange in kept] == ["key 2", "key 3", "key 4"]
    assert kept[-1] is latest
    assert kept[-1].request is not None
    assert kept[-1].request.user_text == "number 4"
    assert (latest.http_request.method, latest.http_request.path, latest.state, latest.status) == (
        "POST",
        MESSAGES,
        "sent",
        200,
    )


async def test_a_server_that_does_not_run_has_no_url() -> None:
    with pytest.raises(RuntimeError):
        _ = MockProvider().url


def _ids(body: dict[str, Any]) -> list[str]:
    if "choices" in body:
        return [call["id"] for call in body["choices"][0]["message"]["tool_calls"]]
    return [block["id"] for block in body["content"]]

"""Tools of kind `client` at the doors of other protocols: each by its own client, streamed and whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors, types

from tests.waiting import eventually_sync
from tokenbus.errors import RunCancelled
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import ModelRequest, Reply, ToolCall

ADA, EVE = new_key(), new_key()
KEYS = f"""
[gateway.keys.ada]
sha256 = "{ADA.sha256}"
tenant = "ada"
[gateway.keys.eve]
sha256 = "{EVE.sha256}"
tenant = "eve"
"""
SETTINGS = (
    """
[gateway]
tools = ["where", "weather", "shell", "briefly"]
keep_alive_s = 0.2
early_status_s = 60
[tools.where]
kind = "client"
description = "Where the user is."
parameters = { type = "object" }
result = { type = "object", properties = { city = { type = "string" } }, required = ["city"] }
[tools.briefly]
kind = "client"
timeout_s = 0.2
[tools.shell]
kind = "client"
format = { type = "text" }
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""
    + KEYS
)
ROME = '{"city": "Rome"}'
HERE, THERE = ToolCall(name="where", arguments={"n": 1}), ToolCall(name="where", arguments={"n": 2})
WEATHER = ToolCall(name="weather", arguments={"city": "Bonn"})
TOOLS = ["where", "weather"]


class Call(NamedTuple):
    id: str
    name: str
    input: Any


class Said(NamedTuple):
    text: str
    calls: list[Call]
    finish: str
    used: int | None
    """Tokens of the prompt."""


class Door(ABC):
    """One protocol by its own client, which keeps the conversation."""

    wants_result: str
    ends: str
    key = ADA.text

    def __init__(self, url: str, model: str, tools: Sequence[str] = TOOLS, *, stream: bool) -> None:
        self.url, self.model, self.stream = url, model, stream
        self.headers = {"x-tokenbus-tools": ",".join(tools)}
        self.said: list[Any] = []

    @abstractmethod
    def ask(self, text: str) -> Said:
        """Say something."""

    @abstractmethod
    def give(self, *results: tuple[Call, str], text: str = "") -> Said:
        """Give results, and say something else if there is a text."""


class Chat(Door):
    wants_result, ends = "tool_calls", "stop"

    def ask(self, text: str) -> Said:
        self.said.append({"role": "user", "content": text})
        return self._send()

    def give(self, *results: tuple[Call, str], text: str = "") -> Said:
        self.said += [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in results]
        return self.ask(text) if text else self._send()

    def _send(self) -> Said:
        with openai.OpenAI(
            api_key=self.key, base_url=f"{self.url}/v1", max_retries=0, _strict_response_validation=True
        ) as made:
            given: Any = {"model": self.model, "messages": self.said, "extra_headers": self.headers}
            if self.stream:
                with made.chat.completions.stream(**given, stream_options={"include_usage": True}) as events:
                    whole: Any = events.get_final_completion()
            else:
                whole = made.chat.completions.create(**given)
        (choice,) = whole.choices
        self.said.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = [
            Call(call.id, call.function.name, json.loads(call.function.arguments))
            if call.type == "function"
            else Call(call.id, call.custom.name, call.custom.input)
            for call in choice.message.tool_calls or ()
        ]
        return Said(choice.message.content or "", calls, choice.finish_reason, whole.usage.prompt_tokens)


class Responses(Door):
    wants_result, ends = "completed", "completed"
    previous: str | None = None

    def ask(self, text: str) -> Said:
        return self._send([{"role": "user", "content": text}])

    def give(self, *results: tuple[Call, str], text: str = "") -> Said:
        given = [
            {"type": "function_call_output", "call_id": call.id, "output": result}
            if isinstance(call.input, dict)
            else {"type": "custom_tool_call_output", "call_id": call.id, "output": result}
            for call, result in results
        ]
        return self._send([*([{"role": "user", "content": text}] if text else []), *given])

    def _send(self, said: list[Any]) -> Said:
        with openai.OpenAI(
            api_key=self.key, base_url=f"{self.url}/v1", max_retries=0, _strict_response_validation=True
        ) as made:
            given: Any = {"model": self.model, "input": [*self.said, *said], "extra_headers": self.headers}
            if self.stream:  # by its id
                given |= {"input": said, "previous_response_id": self.previous}
                with made.responses.stream(**given) as events:
                    whole: Any = events.get_final_response()
            else:  # the whole conversation
                whole = made.responses.create(**given)
        self.said += [*said, *(item.model_dump(exclude_none=True) for item in whole.output)]
        self.previous = whole.id
        calls = [
            Call(item.call_id, item.name, json.loads(item.arguments))
            if item.type == "function_call"
            else Call(item.call_id, item.name, item.input)
            for item in whole.output
            if item.type in ("function_call", "custom_tool_call")
        ]
        return Said(whole.output_text, calls, whole.status, whole.usage.input_tokens)


class Messages(Door):
    wants_result, ends = "tool_use", "end_turn"

    def ask(self, text: str) -> Said:
        self.said.append({"role": "user", "content": text})
        return self._send()

    def give(self, *results: tuple[Call, str], text: str = "") -> Said:
        given: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": said} for call, said in results]
        self.said.append({"role": "user", "content": given + ([{"type": "text", "text": text}] if text else [])})
        return self._send()

    def _send(self) -> Said:
        with anthropic.Anthropic(
            api_key=self.key, base_url=f"{self.url}/anthropic", max_retries=0, _strict_response_validation=True
        ) as made:
            given: Any = {"model": self.model, "max_tokens": 99, "messages": self.said, "extra_headers": self.headers}
            if self.stream:
                with made.messages.stream(**given) as events:
                    whole: Any = events.get_final_message()
            else:
                whole = made.messages.create(**given)
        self.said.append({"role": "assistant", "content": [block.model_dump() for block in whole.content]})
        text = "".join(block.text for block in whole.content if block.type == "text")
        calls = [Call(block.id, block.name, block.input) for block in whole.content if block.type == "tool_use"]
        return Said(text, calls, whole.stop_reason, whole.usage.input_tokens)


class Gemini(Door):
    wants_result, ends = "STOP", "STOP"

    def ask(self, text: str) -> Said:
        self.said.append(types.Content(role="user", parts=[types.Part(text=text)]))
        return self._send()

    def give(self, *results: tuple[Call, str], text: str = "") -> Said:
        parts = [
            types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response=_object(result)))
            for call, result in results
        ]
        self.said.append(types.Content(role="user", parts=parts + ([types.Part(text=text)] if text else [])))
        return self._send()

    def _send(self) -> Said:
        options = types.HttpOptions(base_url=f"{self.url}/gemini", headers=self.headers)
        with genai.Client(api_key=self.key, http_options=options) as made:
            if self.stream:
                answers = list(made.models.generate_content_stream(model=self.model, contents=self.said))
            else:
                answers = [made.models.generate_content(model=self.model, contents=self.said)]
        parts = [
            part
            for answer in answers
            for candidate in answer.candidates or ()
            if candidate.content
            for part in candidate.content.parts or ()
        ]
        self.said.append(types.Content(role="model", parts=parts))
        calls = [
            Call(part.function_call.id or "", part.function_call.name or "", part.function_call.args)
            for part in parts
            if part.function_call
        ]
        (last,) = answers[-1].candidates or []
        assert last.finish_reason is not None
        usage = answers[-1].usage_metadata
        return Said(
            "".join(part.text or "" for part in parts),
            calls,
            last.finish_reason.name,
            usage.prompt_token_count if usage else None,
        )


def _object(result: str) -> dict[str, Any]:
    return json.loads(result) if result.startswith("{") else {"output": result}


DOORS = [Chat, Responses, Messages, Gemini]


def answers(request: ModelRequest) -> Reply:
    """Calls until it has as many results as it wants, and tells them."""
    name = request.model
    results = [
        part
        for message in request.body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part.get("type") == "tool_result"
    ]
    told = [str(part["content"]) for part in results]
    wants = {
        "one": [[HERE]],
        "both": [[HERE, THERE]],
        "mixed": [[WEATHER, HERE]],
        "mixed last": [[HERE, WEATHER]],
        "again": [[HERE], [THERE]],
        "late": [[ToolCall(name="briefly", arguments={})]],
    }[name]
    done = 0
    for calls in wants:
        if len(told) < done + len(calls):
            return Reply(text="I look.", tool_calls=tuple(calls))
        done += len(calls)
    return Reply(text=" ".join(["I know:", *told]))


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        for model in ("one", "both", "mixed", "mixed last", "again", "late"):
            running.model_says(model, answers)
        running.model_says(
            "shell", *[Reply(tool_calls=(ToolCall(name="shell", arguments="ls", free_text=True),)), "Ok."] * 4
        )
        yield running


@pytest.fixture(params=DOORS, ids=lambda door: door.__name__)
def door(request: pytest.FixtureRequest, bus: LocalBus) -> Callable[..., Door]:
    def made(model: str, *, stream: bool = False, tools: Sequence[str] = TOOLS) -> Door:
        return request.param(bus.gateway, model if "/" in model else f"anthropic/{model}", tools, stream=stream)

    return made


def run_of(call: Call) -> str:
    return call.id.removeprefix("wait_").rpartition("_")[0]


def refused(door: Door, *results: tuple[Call, str], text: str = "") -> int:
    """The status of what is refused; the conversation stays as it was."""
    before = list(door.said)
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError, errors.APIError)) as raised:
        door.give(*results, text=text)
    door.said = before
    error: Any = raised.value
    return getattr(error, "status_code", None) or error.code


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_ends_the_answer_and_its_result_goes_on_with_the_same_run(
    door: Any, bus: LocalBus, stream: bool
) -> None:
    chat = door("one", stream=stream)
    asked = len(bus.requests)
    first = chat.ask("Where am I?")
    (call,) = first.calls
    assert (call.name, call.input, first.text, first.finish) == ("where", {"n": 1}, "I look.", chat.wants_result)
    last = chat.give((call, ROME))
    assert (json.loads(last.text.removeprefix("I know: ")), last.finish) == (json.loads(ROME), chat.ends)
    assert last.calls == []
    assert first.used
    assert last.used == first.used, "each counts what it took itself"
    assert len(bus.requests) == asked + 2, "no other run began"
    with bus.sync_client() as client:
        assert client.result(run_of(call), timeout=60).text == f"{first.text}\n\n{last.text}"
    again = chat.ask("And now?")
    assert again.text.startswith("I know:"), "the conversation of the client has the call and its result"
    assert len(bus.requests) == asked + 3


@pytest.mark.parametrize("model", ["both", "mixed", "mixed last"])
def test_all_calls_of_an_answer_get_their_results_at_once_and_those_of_here_run_beside(door: Any, model: str) -> None:
    chat = door(model)
    first = chat.ask("go")
    assert {call.name for call in first.calls} == {"where"}, "the client does not see what runs here"
    results = [(call, f'{{"city": "C{n}"}}') for n, call in enumerate(first.calls)]
    if len(results) > 1:
        assert refused(chat, results[1]) == 400
    last = chat.give(*reversed(results))
    assert all(f"C{n}" in last.text for n in range(len(results)))
    assert ("Bonn" in last.text) == (model != "both")


def test_a_run_that_calls_again_has_an_answer_for_each_time(door: Any) -> None:
    chat = door("again", stream=True)
    said = chat.ask("go")
    seen = []
    while said.calls:
        (call,) = said.calls
        seen.append(call.input)
        said = chat.give((call, ROME))
    assert seen == [{"n": 1}, {"n": 2}]
    assert said.text.startswith("I know:")


def test_a_result_counts_once_and_only_for_its_own_call_and_tenant(door: Any, bus: LocalBus) -> None:
    chat = door("one")
    (call,) = chat.ask("go").calls
    chat.key = EVE.text
    assert refused(chat, (call, ROME)) == 404
    chat.key = ADA.text
    assert refused(chat, (call._replace(id=call.id[:-1] + "9"), ROME)) == 404
    assert refused(chat, (call, '{"town": "Rome"}')) == 400, "it does not match the schema, and the call still waits"
    before, asked = list(chat.said), len(bus.requests)
    last = chat.give((call, ROME))
    chat.said = list(before)
    assert chat.give((call, ROME)).text == last.text, "a client that lost the answer sends it again"
    chat.said = list(before)
    assert refused(chat, (call, '{"city": "Bonn"}')) == 409
    assert len(bus.requests) == asked + 1


def test_the_deadline_decides_for_a_client_that_never_answers(door: Any, bus: LocalBus) -> None:
    chat = door("late", tools=["briefly"])
    asked = len(bus.requests)
    (call,) = chat.ask("go").calls
    eventually_sync(lambda: len(bus.requests) == asked + 2)
    assert refused(chat, (call, "late")) == 409


def test_runs_side_by_side_each_get_their_own_result(door: Any) -> None:
    chats = [door("one") for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda chat: chat.ask("go"), chats))
        given = [
            (chat, one.calls[0], f'{{"city": "C{n}"}}') for n, (chat, one) in enumerate(zip(chats, said, strict=True))
        ]
        ended = list(pool.map(lambda one: one[0].give((one[1], one[2])), reversed(given)))
    assert [f"C{2 - n}" in one.text for n, one in enumerate(ended)] == [True, True, True]


def test_what_is_said_with_a_result_begins_a_new_run_and_ends_the_one_that_waits(door: Any, bus: LocalBus) -> None:
    chat = door("one")
    (call,) = chat.ask("go").calls
    run = run_of(call)
    if isinstance(chat, Responses):  # its rule for approvals holds: answers stand alone
        assert refused(chat, (call, ROME), text="And?") == 400
        return
    last = chat.give((call, ROME), text="And?")
    assert "Rome" in last.text
    with bus.sync_client() as client, pytest.raises(RunCancelled):
        client.result(run)


def test_free_text_goes_to_the_client_as_its_protocol_says_it(door: Any) -> None:
    chat = door("openai-responses/shell", tools=["shell"])
    (call,) = chat.ask("go").calls
    assert call.input == ("ls" if isinstance(chat, Chat | Responses) else {"input": "ls"})
    assert chat.give((call, "a.txt")).text == "Ok."


def test_the_program_of_the_guide_runs(bus: LocalBus, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "gateway.md").read_text()
    (program,) = re.findall(r"```python\n(# where\.py\n.*?)```", guide, re.DOTALL)
    for shown, here in (
        ("http://127.0.0.1:8088", bus.gateway),
        ("sonnet", "anthropic/one"),
        ('"any"', f'"{ADA.text}"'),
    ):
        assert shown in program
        program = program.replace(shown, here)
    script = tmp_path / "where.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Bonn" in done.stdout

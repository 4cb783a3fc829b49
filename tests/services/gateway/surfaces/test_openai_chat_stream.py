"""The stream of Chat Completions: what OpenAI's own types and accumulator accept, for any log of a run."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.rows import over_rows
from tests.services.gateway.logs import (
    BUSY,
    DONE,
    ROWS,
    Log,
    answered,
    any_log,
    call,
    log_of,
    recorded_events,
    streamed,
    text,
    thinking,
)
from tests.unit.providers.corpus import Recording
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.public import TERMINAL, Completed
from tokenbus.events.requests import OnFailure
from tokenbus_services.gateway.surfaces.contract import GatewayNote
from tokenbus_services.gateway.surfaces.openai_chat.answer import ChatEncoder, whole_chat


def note(on_failure: OnFailure | None = None) -> GatewayNote:
    echo = {"usage": True, **({"on_failure": on_failure} if on_failure else {})}
    return GatewayNote(surface="openai_chat", version=1, created=1_763_784_000, model="p/m", echo=echo)


class Answer:
    """What a client has of a stream. Fails for what OpenAI's types or its accumulator refuse."""

    def __init__(self, log: Log, of: GatewayNote | None = None) -> None:
        events = streamed(ChatEncoder(of or note(), "r1"), log).decode().split("\n\n")
        assert events.pop() == ""
        self.done = events[-1:] == ["data: [DONE]"]
        self.error: dict[str, Any] | None = None
        self.finish: str | None = None
        self.message: Any = None
        self.usage: Any = None
        state = ChatCompletionStreamState()
        for event in events[: len(events) - self.done]:
            assert self.error is None, "nothing follows an error"
            assert self.usage is None, "the usage is in the last chunk: a later one would erase it"
            data = msgspec.json.decode(event.removeprefix("data: "))
            if error := data.get("error"):
                self.error = error
                continue
            for choice in data["choices"]:
                for delta in choice["delta"].get("tool_calls", ()):
                    assert None not in delta.values()
            chunk = ChatCompletionChunk.model_validate(data)
            state.handle_chunk(chunk)
            self.usage = chunk.usage
            snapshot = state.current_completion_snapshot
            self.message = snapshot.choices[0].message
            self.finish = snapshot.choices[0].finish_reason
        assert not (self.done and self.error), "an error is the last event"

    @property
    def text(self) -> str:
        return (self.message and self.message.content) or ""

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        calls = (self.message and self.message.tool_calls) or []
        return [(call.id, call.function.name, call.function.arguments) for call in calls]


def check(log: Log, of: GatewayNote | None = None) -> Answer:
    """The text is the visible text, the calls are those that are not void, and the end is sent."""
    answer, response = Answer(log, of), Response.of(log)
    assert answer.text == response.text
    assert answer.done == isinstance(log[-1], Completed)
    assert bool(answer.error) == (isinstance(log[-1], TERMINAL) and not answer.done)
    if answer.done:
        assert answer.finish
        assert answer.usage
        complete = [(b.tool_id, b.tool_name, b.arguments or "{}") for b in response.tool_calls if not b.cut]
        cut = [(b.tool_id, b.tool_name, b.arguments) for b in response.tool_calls if b.cut and b.arguments]
        assert sorted(
            finished_call for finished_call in answer.calls if finished_call in complete or finished_call not in cut
        ) == sorted(complete)
        status, body = answered(whole_chat(of or note(), "r1"), log)
        whole = ChatCompletion.model_validate(body).choices[0]
        assert (status, whole.message.content or "", whole.finish_reason) == (200, answer.text, answer.finish)
        given = body["choices"][0]["message"].get("tool_calls", [])
        assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in given] == complete
    return answer


@given(any_log())
def test_any_log_gives_a_valid_answer_with_the_visible_text(log: Log) -> None:
    check(log)


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_every_recorded_stream_is_encoded_completely(row: Recording) -> None:
    log = recorded_events(row)
    if any(getattr(event, "free_text", None) for event in log):
        return  # the client's types of a stream have no calls of custom tools
    answer = check(log, note("fail"))
    if answer.done:
        # Of an attempt that failed it is not taken back: it does no harm when it comes again.
        assert (getattr(answer.message, "reasoning_content", "") or "").endswith(Response.of(log).thinking)


def test_a_call_without_arguments_has_an_empty_object() -> None:
    calls = [*call(0, "c1", "f"), *call(1, "c2", "g", '{"a":', "1}"), n.Done("tool_use")]
    answer = check(log_of(calls, max_tool_depth=0))
    assert answer.calls == [("c1", "f", "{}"), ("c2", "g", '{"a":1}')]
    assert answer.finish == "tool_calls"


def test_a_client_gets_no_call_of_a_failed_attempt() -> None:
    failing = [*thinking(0, "wrong"), *call(1, "t1", "f", "{}"), n.Failed(BUSY)]
    answer = check(log_of(failing, [*text(0, "Hi"), DONE]))
    assert (answer.text, answer.calls, answer.finish) == ("Hi", [], "stop")

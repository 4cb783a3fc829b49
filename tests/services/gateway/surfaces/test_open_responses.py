"""Open Responses' schema accepts every response, and every event, that the Responses surface writes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from tests.services.gateway.logs import BUSY, DONE, ROWS, Log, any_log, log_of, recorded_events, thinking
from tests.services.gateway.rules import gateway_request, rules, translated
from tests.services.gateway.surfaces import open_responses as spec
from tests.unit.core.run.script import RUN, call, text
from tests.unit.providers.corpus import needs_corpus
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested, ToolReturned
from tokenbus.events.public import TERMINAL, PublicEvent
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import GatewayNote
from tokenbus_services.gateway.surfaces.hosted import citations_of
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.gateway.surfaces.openai_responses.response_log import (
    DONE as LAST,
)
from tokenbus_services.gateway.surfaces.openai_responses.response_log import (
    ResponseSoFar,
    ResponseStream,
    WholeResponse,
)

SURFACE = OpenAIResponsesSurface()
TOOL = {"type": "function", "name": "f"}
ALLOWED = rules(tools=frozenset({"weather"}))


def note(model: str = "openai/m", **more: Any) -> GatewayNote:
    """The note of a run for this request."""
    request = translated(SURFACE, gateway_request({"model": model, "input": "Hi", **more}), ALLOWED)
    return GatewayNote(
        surface=SURFACE.name, version=SURFACE.version, created=1_763_784_000, model=request.model, echo=request.echo
    )


def check(log: Log, of: GatewayNote) -> list[spec.AnyEvent]:
    """Every event of the stream, its order and its end; the response at each point, and the whole one."""
    encoder = ResponseStream(of, RUN)
    pieces = [piece for event in log for piece in encoder.feed(event)]
    if isinstance(log[-1], TERMINAL):
        assert pieces.pop() == LAST
    events: list[spec.AnyEvent] = []
    for piece in pieces:
        name, data = piece.removesuffix(b"\n\n").split(b"\ndata: ")
        events.append(spec.parse_event(data))
        assert name.decode() == f"event: {events[-1].__struct_config__.tag}"
    _check_order(events)
    so_far, whole = ResponseSoFar(of, RUN), WholeResponse(of, RUN)
    for event in log:
        so_far.feed(event)
        spec.parse_response(so_far.answer().body)
        if (answer := whole.feed(event)) and answer.status == 200:
            spec.parse_response(answer.body)
        elif answer:
            msgspec.json.decode(answer.body, type=_Refused)
    return events


class _Refused(msgspec.Struct):
    error: spec.ErrorFields


def _check_order(events: list[spec.AnyEvent]) -> None:
    """Numbers rise; an item is added before anything of it, done once, and then nothing of it follows. Only a call that
    a failure or a cancel cut is never done: clients run a call once it is.
    """
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert not events or isinstance(events[0], spec.Created)
    open_: dict[int, str] = {}
    done: set[int] = set()
    for event in events:
        match event:
            case spec.ItemAdded(item=item, output_index=index):
                assert item
                assert index not in open_.keys() | done
                open_[index] = item.id
            case spec.ItemDone(item=item, output_index=index):
                assert item
                assert open_.pop(index) == item.id
                done.add(index)
            case spec.OfItem(item_id=item_id, output_index=index):
                assert open_[index] == item_id
            case spec.Completed() | spec.Failed() | spec.Incomplete():
                withdrawn = {index for index, item in open_.items() if item.startswith("fc_")}
                assert open_.keys() == (set() if isinstance(event, spec.Completed) else withdrawn)
                assert event is events[-1]
                assert len(event.response.output) == len(done)
            case _:
                pass


def _has_no_item(event: PublicEvent) -> bool:
    """Whether the specification has no word for it: for an image, a custom tool, what providers do themselves, and a
    file that a text cites.
    """
    item: str = getattr(event, "item", None) or ""
    free_text = getattr(event, "free_text", None)  # the call of a custom tool
    return (
        bool(free_text)
        or getattr(event, "kind", "") == "image"
        or bool(item)
        or any(not each.url for each in citations_of(event))
    )


@needs_corpus
def test_every_recorded_stream() -> None:
    of, logs = note(), [recorded_events(row) for row in ROWS]
    checked = [check(log, of) for log in logs if not any(map(_has_no_item, log))]
    assert len(checked) > 0.7 * len(ROWS)


@settings(max_examples=40)
@given(any_log())
def test_any_log(log: Log) -> None:
    check(log, note(background=True, tools=[TOOL]))


SEARCH = [*thinking(0, "hm", signature="s"), *text(1, "I look."), *call(2, "c1", "weather", "{}")]
LOGS: dict[str, tuple[Log, type[spec.OfResponse]]] = {
    "text": (log_of([*text(0, "Hi"), DONE]), spec.Completed),
    "nothing": (log_of([DONE]), spec.Completed),
    "reasoning": (log_of([*thinking(0, "hm", signature="s"), *text(1, "Hi"), DONE]), spec.Completed),
    "hidden reasoning": (
        log_of([n.BlockStart(0, "thinking"), n.Opaque(0, "redacted", "x"), n.BlockStop(0), *text(1, "Hi"), DONE]),
        spec.Completed,
    ),
    "calls": (log_of([*SEARCH, n.Done("tool_use")], max_tool_depth=0), spec.Completed),
    "tools of the bus": (
        log_of([*SEARCH, n.Done("tool_use")], [ToolReturned(2, "Rain.", False)], [*text(0, "Rain."), DONE]),
        spec.Completed,
    ),
    "a tool that fails": (
        log_of([*SEARCH, n.Done("tool_use")], [ToolReturned(2, "no", True)], [*text(0, "Hm."), DONE]),
        spec.Completed,
    ),
    "retried": (log_of([*thinking(0, "no"), n.Failed(BUSY)], [*text(0, "Hi"), DONE]), spec.Completed),
    "too long": (log_of([*text(0, "Hi"), n.Done("length")]), spec.Incomplete),
    "filtered": (log_of([*text(0, "Hi"), n.Done("content_filter")]), spec.Incomplete),
    "failed": (log_of([n.Failed(msgspec.structs.replace(BUSY, retryable=False))]), spec.Failed),
    "cut": (log_of([*text(0, "Hal")[:-1], n.Cut("reset")]), spec.Failed),
    "cut in a call": (
        log_of([*text(0, "Hi"), *call(1, "c1", "f", "{")[:-1], n.Cut("reset")], on_failure="before_first_visible"),
        spec.Failed,
    ),
    "cancelled": (log_of([*text(0, "Hal")[:-1]], [CancelRequested("enough")]), spec.Incomplete),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "background": {"background": True},
    "functions": {"tools": [TOOL, {**TOOL, "name": "g", "description": "G", "strict": True}], "tool_choice": "auto"},
    "one function": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
    "tools of the bus": {"tokenbus": {"tools": ["weather"], "show_tools": True}},
    "a schema": {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}},
    "a strict schema": {
        "text": {
            "format": {
                "type": "json_schema",
                "name": "s",
                "description": "d",
                "schema": {"type": "object", "properties": {}, "additionalProperties": False},
                "strict": True,
            },
            "verbosity": "low",
        }
    },
    "an object": {"text": {"format": {"type": "json_object"}}},
    "reasoning": {"reasoning": {"effort": "high"}},
    "a summary": {"reasoning": {"summary": "auto"}},
    "no reasoning": {"reasoning": {"effort": "none"}},
    "settings": {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "service_tier": "priority",
        "parallel_tool_calls": False,
        "store": True,
        "truncation": "disabled",
    },
    "nulls": dict.fromkeys(
        ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "tools", "tool_choice", "text")
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_each_kind_of_answer_to_a_request(name: str) -> None:
    of = note(**REQUESTS[name])
    for log, end in LOGS.values():
        assert isinstance(check(log, of)[-1], end)


def test_the_answer_of_a_gateway_that_cannot_continue() -> None:
    problem = Problem(status=503, code="gateway_restarting", message="later", kind="overloaded", run=RUN)
    for log in ([], log_of([*text(0, "Hal")[:-1]])):
        encoder = ResponseStream(note(), RUN)
        pieces = [*(piece for event in log for piece in encoder.feed(event)), *encoder.broken(problem)]
        assert pieces.pop() == LAST
        events = [spec.parse_event(piece.removesuffix(b"\n\n").split(b"\ndata: ")[1]) for piece in pieces]
        _check_order(events)
        assert isinstance(events[-1], spec.Failed)


def test_a_response_without_one_of_its_fields_is_found() -> None:
    whole = WholeResponse(note(), RUN)
    (answer,) = [answer for event in LOGS["text"][0] if (answer := whole.feed(event))]
    for field in spec.Response.__struct_fields__:
        body = msgspec.json.decode(answer.body)
        del body[field]
        with pytest.raises(msgspec.ValidationError, match=field):
            spec.parse_response(msgspec.json.encode(body))

"""No encoder of any surface emits bytes that break one of its clients.

There is no dialect of server-sent events that all clients read. Each rule here was seen to break a client: an `id:`
those of Gemini, and with comments the Python client of OpenAI; an event without data both of OpenAI; CRLF that of
AG-UI; a missing name those of Anthropic; `[DONE]` those of Gemini and AG-UI; a missing blank line at the end most.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given

from tests.services.gateway.logs import ROWS, Log, any_log, log_of, recorded_events, text
from tests.services.gateway.rules import gateway_request, rules
from tests.unit.providers.corpus import needs_corpus
from tokenbus.events import normalized as n
from tokenbus.events.public import TERMINAL
from tokenbus_services.gateway import surfaces
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote, GatewayRequest
from tokenbus_services.gateway.surfaces.surface import Surface

HI = [{"role": "user", "content": "Hi"}]
COMMENT = b": keep-alive\n\n"
PROBLEM = Problem(status=503, code="gateway_restarting", message="later", kind="overloaded", run="r1")


class SseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What may stand in a stream, and a request that asks for one."""

    event: str
    """One event, as a pattern over its lines."""
    keep_alive: bytes
    request: GatewayRequest
    done: bool = False
    """Whether `data: [DONE]` ends the stream."""
    named: bool = False
    """Whether an event's name is the type in its data."""
    ends_by_error: bool = True
    """Whether a failed answer is reported by an event whose data holds `error`."""


DATA = r"data: (?P<data>\{[^\r\n]+\})\n"
NAMED = rf"event: (?P<name>[\w.:-]+)\n{DATA}"
UI = [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}]
DIALECTS = {
    "openai_chat": SseFormat(
        event=DATA,
        keep_alive=COMMENT,
        request=gateway_request(
            {"model": "openai/m", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        ),
        done=True,
    ),
    "openai_responses": SseFormat(
        event=NAMED,
        keep_alive=COMMENT,
        request=gateway_request({"model": "openai/m", "input": "Hi", "stream": True}),
        done=True,
        named=True,
        ends_by_error=False,
    ),
    "anthropic_messages": SseFormat(
        event=NAMED,
        keep_alive=b'event: ping\ndata: {"type": "ping"}\n\n',
        request=gateway_request({"model": "anthropic/m", "max_tokens": 9, "messages": HI, "stream": True}),
        named=True,
    ),
    "gemini": SseFormat(
        event=DATA,
        keep_alive=b"\n",
        request=gateway_request(
            {
                "contents": [{"parts": [{"text": "Hi"}]}],
                "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
            },
            path={"model": "gemini/m", "method": "streamGenerateContent"},
        ),
    ),
    "ai_sdk_ui": SseFormat(
        event=DATA,
        keep_alive=COMMENT,
        request=gateway_request({"id": "c", "messages": UI, "trigger": "submit-message", "model": "openai/m"}),
        done=True,
    ),
    "ag_ui": SseFormat(
        event=DATA,
        keep_alive=COMMENT,
        request=gateway_request(
            {
                "threadId": "t",
                "runId": "r",
                "state": None,
                "messages": [{"id": "m1", **HI[0]}],
                "tools": [],
                "context": [],
                "forwardedProps": {"model": "openai/m"},
            }
        ),
        ends_by_error=False,
    ),
}


def served() -> Iterator[Surface]:
    """Every surface of the gateway that answers with an event stream of the dialects above."""
    for package in pkgutil.iter_modules(surfaces.__path__):
        if package.ispkg and package.name in DIALECTS:
            module = importlib.import_module(f"{surfaces.__name__}.{package.name}")
            found = (value for _, value in inspect.getmembers(module, inspect.isclass))
            for kind in found:
                if (
                    issubclass(kind, Surface)
                    and kind is not Surface
                    and kind.media_type.startswith("text/event-stream")
                ):
                    yield kind()


SURFACES = {surface.name: surface for surface in served()}
each_surface = pytest.mark.parametrize("name", SURFACES)


def encoder_of(name: str) -> Encoder:
    surface, request = SURFACES[name], DIALECTS[name].request
    translated = surface.translate(request, rules())
    note = GatewayNote(surface=name, version=surface.version, created=1, model=translated.model, echo=translated.echo)
    return surface.encoder(request, note, "r1")


def check(name: str, elements: list[bytes], *, over: bool) -> list[dict[str, Any]]:
    """Fail unless every element is one or more whole events of the dialect; return their data."""
    dialect = DIALECTS[name]
    event = re.compile(f"(?:{dialect.event})\n")
    found: list[dict[str, Any]] = []
    done = False
    for element in elements:
        stream = element.decode()  # strict: no byte that is not UTF-8
        assert stream.splitlines() == stream.split("\n")[:-1], "one end of a line, for any client"
        at = 0
        while at < len(stream):
            assert not done, "nothing follows [DONE]"
            if dialect.done and stream[at:] == "data: [DONE]\n\n":
                done, at = True, len(stream)
                continue
            match = event.match(stream, at)
            assert match, stream[at : at + 300]
            data = msgspec.json.decode(match["data"])
            assert data, "an event without content is a bogus chunk"
            assert not dialect.named or data["type"] == match["name"]
            found.append(data)
            at = match.end()
    assert done == (dialect.done and over)
    return found


def fed(name: str, log: Log) -> list[bytes]:
    encoder = encoder_of(name)
    return [element for event in log for element in encoder.feed(event)]


def is_over(log: Log) -> bool:
    return isinstance(log[-1], TERMINAL)


def test_the_surfaces_with_event_streams_are_found() -> None:
    assert {"anthropic_messages", "gemini"} <= set(SURFACES)


@each_surface
def test_silence_is_filled_with_what_its_clients_skip(name: str) -> None:
    assert SURFACES[name].keep_alive == DIALECTS[name].keep_alive


@needs_corpus
@each_surface
def test_every_recorded_stream(name: str) -> None:
    for row in ROWS:
        elements = fed(name, recorded_events(row))
        ended_by_done = DIALECTS[name].done and elements[-1:] == [b"data: [DONE]\n\n"]
        assert check(name, elements, over=ended_by_done), row.file


def _any_stream(name: str) -> Callable[[], None]:
    @given(any_log())
    def any_stream(log: Log) -> None:
        elements = fed(name, log)
        ended_by_done = DIALECTS[name].done and elements[-1:] == [b"data: [DONE]\n\n"]
        assert is_over(log) or not ended_by_done
        check(name, elements, over=ended_by_done)

    return any_stream


@each_surface
def test_any_log(name: str) -> None:
    _any_stream(name)()


@each_surface
def test_text_with_other_ends_of_lines_stays_on_one_line(name: str) -> None:
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh\ti"
    log = log_of([*text(0, odd), n.Done("stop")])
    elements = fed(name, log)
    check(name, elements, over=DIALECTS[name].done)
    assert odd in "".join(_strings([msgspec.json.decode(line[6:]) for line in _data_lines(elements)]))


def _data_lines(elements: list[bytes]) -> Iterator[bytes]:
    for element in elements:
        yield from (line for line in element.split(b"\n") if line.startswith(b"data: {"))


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from _strings(inner)
        case list():
            for inner in value:
                yield from _strings(inner)
        case _:
            pass


@each_surface
def test_a_broken_answer_ends_in_an_event_of_the_dialect(name: str) -> None:
    begun = log_of([*text(0, "Hal")[:-1]])
    for log in ([], begun):
        encoder = encoder_of(name)
        elements = [element for event in log for element in encoder.feed(event)]
        last = encoder.broken(PROBLEM)
        ended_by_done = DIALECTS[name].done and last[-1:] == [b"data: [DONE]\n\n"]
        events = check(name, [*elements, *last], over=ended_by_done)
        assert check(name, last, over=ended_by_done), "never a silent end"
        assert not DIALECTS[name].ends_by_error or "error" in str(events[-1])

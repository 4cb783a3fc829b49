"""Recorded streams, cut and retried at random: each encoder's output passes its protocol's verifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import ImageGenStreamEvent
from pydantic import TypeAdapter

from tests.services.gateway.logs import BUSY, ROWS, Log, visible_text
from tests.services.gateway.surfaces import (
    test_ag_ui,
    test_ai_sdk_ui,
    test_anthropic_messages,
    test_gemini,
    test_openai_chat_stream,
    test_openai_responses_stream,
)
from tests.unit.core.run.script import Story
from tests.unit.providers.corpus import Recording, needs_corpus
from tests.unit.providers.reading import read
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.frames import BusEvent, CancelRequested
from tokenbus.events.public import TERMINAL, Completed
from tokenbus.events.requests import OnFailure
from tokenbus.providers.api import ApiName
from tokenbus_services.gateway.routes.registry import SURFACES as ALL_SURFACES
from tokenbus_services.gateway.surfaces.contract import GatewayNote
from tokenbus_services.gateway.surfaces.durable_streams import protocol
from tokenbus_services.gateway.surfaces.gemini.answer import GeminiEcho
from tokenbus_services.gateway.surfaces.native import NativeEncoder
from tokenbus_services.gateway.surfaces.openai_images import ImageStream
from tokenbus_services.gateway.surfaces.surface import Echo

MOST_BYTES = 64 * 2**10
POLICIES: tuple[OnFailure, ...] = ("before_first_visible", "before_first_output", "continue", "fail")


class RecordedLog(msgspec.Struct):
    log: Log
    api: ApiName
    policy: OnFailure


@cache
def _recorded(file: str) -> list[n.Normalized]:
    (row,) = (row for row in ROWS if row.file == file)
    return read(row.api_name, row.data)


def _short() -> list[Recording]:
    return [row for row in ROWS if row.bytes <= MOST_BYTES]


def _drawn() -> list[Recording]:
    return [row for row in _short() if any(isinstance(event, n.Image) for event in _recorded(row.file))]


@st.composite
def recorded_logs(draw: st.DrawFn, *, of_images: bool = False) -> RecordedLog:
    """A run of up to three attempts, each a recording or its beginning."""
    among = _drawn() if of_images else _short()
    first = draw(st.sampled_from(among))
    same = [row for row in among if row.api == first.api]
    rows = [first, *draw(st.lists(st.sampled_from(same), max_size=2))]
    policy = draw(st.sampled_from(POLICIES))
    story = Story(on_failure=policy, continues=True, max_tool_depth=0)
    for row in rows:
        events: list[BusEvent] = [*_recorded(row.file)]
        if draw(st.booleans()):
            end = draw(st.sampled_from([n.Failed(BUSY), n.Cut("reset")]))
            events = [*events[: draw(st.integers(0, len(events)))], end]
        attempt = story.run.state.attempt
        for event in events:
            story.provider(event, attempt=attempt)
    if draw(st.integers(0, 9)) == 0:
        story.control(CancelRequested("enough"))
    return RecordedLog(story.events, first.api_name, policy)


def _responses(case: RecordedLog) -> str:
    response = test_openai_responses_stream.read_back(
        test_openai_responses_stream.stream(case.log, test_openai_responses_stream.note(case.policy))
    )
    test_openai_responses_stream.verify(response, ended=isinstance(case.log[-1], TERMINAL))
    return "".join(each["delta"] for each in response if each["type"] == "response.output_text.delta")


def _messages(case: RecordedLog) -> str:
    echo = Echo(api=case.api, on_failure=case.policy)
    return test_anthropic_messages.text_in(test_anthropic_messages.message_of(case.log, echo))


def _gemini(case: RecordedLog) -> str:
    echo = GeminiEcho(api=case.api, thoughts=True, on_failure=case.policy)
    return test_gemini.text_of(test_gemini.response_of(case.log, echo)["parts"])


def _chat(case: RecordedLog) -> str:
    answer = test_openai_chat_stream.check(case.log, test_openai_chat_stream.note(case.policy))
    assert answer.text == Response.of(case.log).text  # which has a blank line between the texts of two turns
    return visible_text(case.log)


def _images(case: RecordedLog) -> str:
    encoder = ImageStream(GatewayNote(surface="openai_images", version=1, created=1, model="m"), "r")
    frames = [piece.decode() for event in case.log for piece in encoder.feed(event)]
    made: list[str] = []
    previews = 0
    for frame in frames:
        name, data = frame.removesuffix("\n\n").split("\n")
        body = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        if body["type"] == "error":
            assert frame == frames[-1]
            assert body["error"]["code"]
            continue
        event = IMAGE_EVENT.validate_python(body, strict=True)
        if event.type == "image_generation.partial_image":
            assert not made
            previews += 1
        else:
            made.append(event.b64_json)
    response = Response.of(case.log)
    images = [block.image.base64 for block in response.blocks if block.image and not block.image.draft]
    ended = isinstance(case.log[-1], TERMINAL)
    assert made == (images if isinstance(case.log[-1], Completed) else [])
    assert bool(made) or not ended or '"error"' in frames[-1], "an answer without an image is an error"
    return visible_text(case.log)  # which this protocol has no place for


def _durable(case: RecordedLog) -> str:
    page = protocol.log_page(0, case.log, tail=len(case.log), closed=isinstance(case.log[-1], TERMINAL))
    stream = protocol.sse_of(page, 1).decode()
    data, control = (event.split("\ndata:")[1] for event in stream.removesuffix("\n\n").split("\n\n"))
    assert data == protocol.body_of(page).decode()
    assert msgspec.json.decode(control).get("streamClosed", False) == page.ended
    return _text_in(msgspec.json.decode(data))


def _native(case: RecordedLog) -> str:
    encoder = NativeEncoder()
    frames = [piece.decode() for event in case.log for piece in encoder.feed(event)]
    events: list[dict[str, Any]] = []
    for seq, frame in enumerate(frames):
        number, name, data = frame.removesuffix("\n\n").split("\n")
        events.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert (number, name) == (f"id: {seq}", f"event: {events[-1]['type']}")
    return _text_in(events)


def _text_in(events: list[dict[str, Any]]) -> str:
    """The text, read from the events as a client in any language does."""
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] in ("retrying", "restarted"):
            texts = {block: text for block, text in texts.items() if block < event["drop_from"]}
        elif event["type"] == "chunk" and event["kind"] == "text":
            texts[event["block"]] = texts.get(event["block"], "") + event["text"]
    return "".join(texts.values())


IMAGE_EVENT: TypeAdapter[ImageGenStreamEvent] = TypeAdapter(ImageGenStreamEvent)
VERIFIERS: dict[str, Callable[[RecordedLog], str]] = {
    "openai_chat": _chat,
    "openai_responses": _responses,
    "anthropic_messages": _messages,
    "gemini": _gemini,
    "ai_sdk_ui": lambda case: test_ai_sdk_ui.Screen(test_ai_sdk_ui.parts(case.log)).text,
    "ag_ui": lambda case: test_ag_ui.Agent(test_ag_ui.events(case.log)).texts(),
    "openai_images": _images,
    "native": _native,
    "durable_streams": _durable,
}


def test_every_surface_is_verified() -> None:
    assert set(VERIFIERS) == set(ALL_SURFACES)


@needs_corpus
@pytest.mark.parametrize("surface", VERIFIERS)
def test_recorded_streams_cut_and_retried_are_accepted_with_their_text(surface: str) -> None:
    @settings(max_examples=15)
    @given(recorded_logs(of_images=surface == "openai_images"))
    def accepted(case: RecordedLog) -> None:
        assert VERIFIERS[surface](case) == visible_text(case.log)

    accepted()

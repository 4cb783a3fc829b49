"""A run as plain text, and single events on a line."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tests.services.cli.events import EventFactory
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import ImageRef, PublicEvent
from tokenbus_services.cli.render.event_text import error, one_line
from tokenbus_services.cli.render.output import PlainText
from tokenbus_services.cli.up.command import log_line


def written(events: Iterable[PublicEvent]) -> str:
    text = PlainText()
    return "".join(text.feed(event) for event in events)


def test_visible_text_comes_as_it_is_and_all_else_on_marked_lines():
    events_of = EventFactory()
    events = [
        events_of.started(),
        events_of.opens(0, "thinking"),
        events_of.chunk(0, "hm", "thinking"),
        events_of.block(0, "thinking", content="hm,\nwell"),
        events_of.chunk(1, "Hel"),
        events_of.chunk(1, "lo\nyou"),
        events_of.block(1, "text", content="Hello\nyou"),
        events_of.block(2, "tool_call", tool_name="weather", tool_id="t", arguments='{"city":"Zürich"}', input={}),
        events_of.block(3, "tool_result", tool_name="weather", content="no rain", is_error=True),
        events_of.chunk(4, "Bye."),
        events_of.completed(),
    ]
    assert written(events) == (
        "[started] anthropic m\n"
        "[thinking] hm,\n"
        "[thinking] well\n"
        "Hello\nyou\n"
        '[tool call weather] {"city":"Zürich"}\n'
        "[tool result weather error] no rain\n"
        "Bye.\n"
        "[completed] stop\n"
        "[usage] input 7, output 3\n"
        "[timing] first byte 5 ms, first text 12 ms, all 40 ms\n"
    )


def test_an_image_is_described_by_its_metadata_and_never_by_its_bytes():
    events_of = EventFactory()
    preview = events_of.preview(0, 0, ImageRef(media_type="image/png", base64="AAAA"))
    image = ImageRef(
        media_type="image/png", base64="AAAA", model="gpt-image-2", revised_prompt="a black cat", draft=True
    )
    events = [events_of.opens(0, "image", prompt="A cat."), preview, events_of.block(0, "image", image=image)]
    assert written(events) == '[image of] A cat.\n[image] image/png gpt-image-2 draft inline "a black cat"\n'
    assert one_line(preview) == "r1 0 image_preview 0 preview 0 image/png inline"


def test_a_tools_progress_is_one_line_for_any_message():
    events_of = EventFactory()
    whole = events_of.progress(1, 1, total=4, message="one\nof four")
    assert one_line(whole) == 'r1 0 tool_progress 1 weather 1 of 4 "one\\nof four"'
    assert written([whole, events_of.progress(1, 2.5)]) == (
        '[tool_progress] 1 weather 1 of 4 "one\\nof four"\n[tool_progress] 1 weather 2.5\n'
    )


def test_each_piece_is_written_when_it_comes():
    events_of, text = EventFactory(), PlainText()
    assert [text.feed(events_of.chunk(0, piece)) for piece in ("a", "b", "\n", "c")] == ["a", "b", "\n", "c"]


def test_two_text_blocks_do_not_run_into_each_other():
    events_of = EventFactory()
    assert written([events_of.chunk(0, "one"), events_of.chunk(1, "two"), events_of.chunk(2, "")]) == "one\ntwo\n"


def test_a_retry_says_why_and_when():
    [line] = written([EventFactory().retrying(0)]).splitlines()
    assert line == "[retrying] attempt 2 in 500 ms, after overloaded_error: come back later (HTTP 529)"


def test_every_event_fits_on_one_line_with_any_content():
    events_of = EventFactory()
    for event in (
        events_of.chunk(0, "a\nb\x1b[2J"),
        events_of.block(0, "text", content="a\nb"),
        events_of.restarted(0),
        events_of.failed(),
        events_of.cancelled(),
        events_of.incomplete(),
    ):
        line = one_line(event)
        assert line.startswith(f"r1 {event.seq} ")
        assert "\n" not in line
        assert "\x1b" not in line


def test_a_log_line_ends_with_a_pointer_to_the_cause():
    fields = {
        "event": "attempt_ended",
        "level": "warning",
        "service": "parser",
        "hint": "set OPENAI_API_KEY where the fetcher runs",
        "code": "key_missing",
    }
    shown = log_line("parser", json.dumps(fields)).plain
    assert shown == "parser │ attempt_ended code=key_missing: set OPENAI_API_KEY where the fetcher runs"


def test_an_errors_place_is_named_once():
    told = ErrorInfo(code="key_missing", kind="auth", message="provider a: A_KEY is not set", where="A_KEY")
    assert error(told) == "key_missing: provider a: A_KEY is not set"
    apart = ErrorInfo(code="provider_error", kind="overloaded", message="later", where="attempt 2", status=529)
    assert error(apart) == "provider_error: later (attempt 2, HTTP 529)"

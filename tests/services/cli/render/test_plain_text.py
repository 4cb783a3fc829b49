"""A run as plain text, and single events on a line."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from tests.services.cli.events import EventFactory
from tokenbus import WaitInfo
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import ImageRef, PublicEvent
from tokenbus_services.cli.render.event_text import error, one_line
from tokenbus_services.cli.render.output import PlainText
from tokenbus_services.cli.runs.waits import line
from tokenbus_services.cli.up.command import log_line
from tokenbus_services.terminal_text import safe_json


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


HOSTILE = "\x1b]0;title\x07\x9b2J\u202egnp"


def test_what_is_said_about_a_run_moves_no_cursor_in_a_file_that_is_shown_later():
    events_of = EventFactory()
    problem = ErrorInfo(code=HOSTILE, kind="server", message=HOSTILE)
    failed = msgspec.structs.replace(events_of.failed(), error=problem)
    for said in (written([failed]), written([events_of.block(0, "thinking", content=HOSTILE)])):
        assert not set(said) & set(HOSTILE[0] + "\x07\x9b\u202e")


def test_json_on_the_command_line_is_the_same_without_control_characters():
    data = msgspec.json.encode({"text": HOSTILE + "é"})
    assert not set(safe_json(data).decode()) & set("\x1b\x07\x9b")
    assert json.loads(safe_json(data)) == json.loads(data)


def test_a_wait_is_one_row_whatever_its_question_says_and_tells_how_much_is_cut():
    asked = {"what": "answer", "tool_id": "t1", "tool_name": "ask", "since_ms": 0, "deadline_ms": 1}
    row = line(WaitInfo(run="r1", wait="0.0", text="sure?\nr2  0.0\u202e\u200b" + "x" * 300, **asked), now_ms=0)
    assert row.startswith("r1  0.0  answer  sure?\\nr2  0.0\\u202e\\u200bxxx")
    assert "… (326 characters; `tokenbus waiting r1 --json` has them all)" in row

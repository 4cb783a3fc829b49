"""Runs on a terminal: what the fold makes of events, and what of it reaches the screen."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from tests.services.cli.events import EventFactory
from tokenbus.events.public import ImageRef, PublicEvent
from tokenbus_services.cli.render.live_view import LiveBlocks, Screen, ShownBlock, panel


def on_screen(*events: PublicEvent, many_runs: bool = False, height: int = 24) -> str:
    """What stays on a terminal of 60 columns after these events."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=height, color_system=None, legacy_windows=False)
    with Screen(console, many_runs=many_runs) as screen:
        for event in events:
            screen.feed(event)
    return out.getvalue()


def test_a_block_grows_while_it_is_open_and_is_done_once_complete():
    events_of, fold = EventFactory(), LiveBlocks()
    assert fold.feed(events_of.opens(0, "text")) == []
    assert fold.feed(events_of.chunk(0, "Hel")) == []
    assert fold.feed(events_of.chunk(0, "lo")) == []
    [growing] = fold.open
    assert growing.text == "Hello"
    [done] = fold.feed(events_of.block(0, "text", content="Hello"))
    assert isinstance(done, ShownBlock)
    assert (done.kind, done.text) == ("text", "Hello")
    assert fold.open == ()


def test_of_a_tool_call_only_its_input_is_content():
    events_of, fold = EventFactory(), LiveBlocks()
    fold.feed(events_of.chunk(0, "weather", "tool_call", tool_call_part="name", tool_name="weather"))
    fold.feed(events_of.chunk(0, "toolu_1", "tool_call", tool_call_part="id"))
    fold.feed(events_of.chunk(0, '{"city":', "tool_call", tool_call_part="input"))
    fold.feed(events_of.chunk(1, "rain", "tool_result", tool_name="weather"))
    assert [(block.title, block.text) for block in fold.open] == [
        ("tool call weather", '{"city":'),
        ("tool result weather", "rain"),
    ]


def test_an_image_shows_its_progress_and_then_its_location():
    events_of, fold = EventFactory(), LiveBlocks()
    fold.feed(events_of.opens(0, "image", prompt="A cat."))
    assert [block.text for block in fold.open] == ["A cat."]
    assert fold.feed(events_of.preview(0, 1, ImageRef(media_type="image/png", size="8x8", size_bytes=2048))) == []
    assert [block.text for block in fold.open] == ["preview 1: image/png 8x8 2.0 KB"]
    [done] = fold.feed(events_of.block(0, "image", image=ImageRef(media_type="image/png", blob_id="sha256:1")))
    assert isinstance(done, ShownBlock)
    assert (done.kind, done.text) == ("image", "image/png sha256:1")


def test_blocks_of_a_lost_attempt_are_void():
    events_of, fold = EventFactory(), LiveBlocks()
    fold.feed(events_of.chunk(0, "kept"))
    fold.feed(events_of.chunk(1, "lost"))
    [void, event] = fold.feed(events_of.restarted(1))
    assert isinstance(void, ShownBlock)
    assert (void.text, void.void) == ("lost", True)
    assert not isinstance(event, ShownBlock)
    assert [block.text for block in fold.open] == ["kept"]


def test_the_end_of_a_run_leaves_none_of_its_blocks_open():
    one, two, fold = EventFactory("one"), EventFactory("two"), LiveBlocks()
    fold.feed(one.chunk(0, "a"))
    fold.feed(two.chunk(0, "b"))
    [cut, _] = fold.feed(one.failed())
    assert isinstance(cut, ShownBlock)
    assert cut.text == "a"
    assert [block.run for block in fold.open] == ["two"]


def test_blocks_that_never_end_give_way_to_newer_ones():
    fold = LiveBlocks(most_open=2)
    runs = [EventFactory(f"r{i}") for i in range(3)]
    assert fold.feed(runs[0].chunk(0, "a")) == []
    assert fold.feed(runs[1].chunk(0, "b")) == []
    assert fold.feed(runs[0].chunk(0, "c")) == []
    [gone] = fold.feed(runs[2].chunk(0, "d"))
    assert isinstance(gone, ShownBlock)
    assert gone.run == "r1", "the one that grew longest ago"


def test_every_block_is_in_a_panel_and_the_end_shows_usage_and_time():
    events_of = EventFactory()
    screen = on_screen(
        events_of.started(),
        events_of.block(0, "thinking", content="let me see"),
        events_of.block(1, "tool_call", tool_name="weather", arguments='{"city":"Zürich"}'),
        events_of.block(2, "tool_result", tool_name="weather", content="light rain"),
        events_of.block(3, "text", content="Take it along."),
        events_of.completed(),
    )
    for shown in ("─ thinking ─", "─ tool call weather ─", '{"city":"Zürich"}', "light rain", "Take it along."):
        assert shown in screen
    assert "input 7, output 3" in screen
    assert "all 40 ms" in screen


def test_a_block_still_open_at_the_end_stays_on_the_screen():
    assert "half a senten" in on_screen(EventFactory().chunk(0, "half a senten"))


def test_with_many_runs_each_panel_names_its_run():
    assert "run-7 · text" in on_screen(EventFactory("run-7").block(0, "text", content="x"), many_runs=True)


def test_a_model_cannot_control_the_terminal():
    events_of = EventFactory()
    attack = "\x1b]0;owned\x07\x1b[2Jbye\r\x9b2J"
    screen = on_screen(
        events_of.block(0, "text", content=attack),
        events_of.block(1, "tool_call", tool_name="\x1b[31mt", arguments=attack),
        events_of.chunk(2, attack),
    )
    for control in ("\x1b]0;owned", "\x1b[2J", "\x07", "\x9b", "\x1b[31m"):
        assert control not in screen
    assert "␛]0;owned␇␛[2Jbye␍" in screen


def test_markup_in_text_is_text():
    assert "[bold]x[/bold] :smile:" in on_screen(EventFactory().block(0, "text", content="[bold]x[/bold] :smile:"))


def test_a_live_panel_shows_the_end_of_a_long_text():
    console = Console(file=StringIO(), width=20, color_system=None)
    with console.capture() as capture:
        console.print(
            panel(ShownBlock("r", 0, "text", "text", [f"line {i}\n" for i in range(50)]), False, last_lines=3)
        )
    shown = capture.get()
    assert "line 49" in shown
    assert "line 46" not in shown

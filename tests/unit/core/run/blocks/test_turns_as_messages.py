"""What public events hand on is what the run's own next turn sends back, to the letter."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.core.run.script import Story, call, item, of_type, text
from tokenbus.client.response import Response
from tokenbus.core.run.blocks.opaque import MAX_INLINE_CHARS
from tokenbus.core.run.checkpoint import Checkpoints
from tokenbus.core.run.effects import NextTurn
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CancelRequested, ResultImage, RunLimits, ToolReturned
from tokenbus.events.public import AudioRef, BlockComplete, BlockStarted, Chunk, RunEnd, RunFailedEvent, blobs_of
from tokenbus.events.requests import (
    BlobSource,
    ExtraPart,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)

START = n.Start("m", "r1", api="openai-responses", provider="main")
ORIGIN = {"api": "openai-responses", "provider": "main"}
BROKEN = n.Failed(ErrorInfo(code="overloaded", kind="overloaded", message="m", retryable=True))


def history(story: Story) -> list[Message]:
    """What the run itself appended to its conversation."""
    turns = [effect.history for effect in story.effects if isinstance(effect, NextTurn)]
    return [message for turn in turns for message in turn or []]


def test_the_messages_of_a_run_are_those_that_its_own_next_turn_sends() -> None:
    story = Story()
    story.provider(
        START,
        n.BlockStart(0, "thinking"),
        n.ThinkingDelta(0, "Hm."),
        n.Opaque(0, "signature", "s"),
        n.Opaque(0, "encrypted", "e"),
        n.BlockStop(0),
        *item(1, "openai-responses.web_search_call", '{"id":"ws_1"}'),
        *text(2, "Let me ", "see."),
        n.Opaque(2, "item_id", "msg_1"),
        *call(3, "a", "f", '{"x":1}'),
        *call(4, "b", "g"),
        *item(5, "openai-responses.last", "{}"),
        n.Done("tool_use"),
    )
    story.control(ToolReturned(4, "no luck", True))
    image = ResultImage("image/png", blob_id="sha256:1", size_bytes=9)
    story.control(ToolReturned(3, "a chart", False, images=[image, ResultImage("image/gif", blob_id="sha256:2")]))
    sent = history(story)
    story.provider(START, *text(0, "Done."), n.Done("stop"))
    response = Response.of(story.events).messages
    assert response[:-1] == sent
    assert response == [
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="Hm.", signature="s", opaque={"encrypted": "e", **ORIGIN}),
                ExtraPart(name="openai-responses.web_search_call", json='{"id":"ws_1"}'),
                TextPart(text="Let me see.", opaque={"item_id": "msg_1", **ORIGIN}),
                ToolCallPart(tool_id="a", tool_name="f", arguments='{"x":1}'),
                ToolCallPart(tool_id="b", tool_name="g", arguments=""),
                ExtraPart(name="openai-responses.last", json="{}"),
            ],
        ),
        Message(
            role="tool",
            content=[
                ToolResultPart(
                    tool_id="a",
                    tool_name="f",
                    content=[
                        TextPart(text="a chart"),
                        ImagePart(source=BlobSource(blob_id="sha256:1", media_type="image/png", size_bytes=9)),
                    ],
                ),
                ToolResultPart(tool_id="b", tool_name="g", content="no luck", is_error=True),
            ],
        ),
        Message(role="assistant", content=[TextPart(text="Done.")]),
    ]


def test_the_end_of_a_block_carries_what_must_go_back_and_whose_it_is() -> None:
    story = Story()
    published = story.provider(
        START,
        n.BlockStart(0, "thinking"),
        n.Opaque(0, "signature", "s"),
        n.Opaque(0, "redacted", "r", "sha256:5"),
        n.Opaque(0, "item_id", "rs_1"),
        n.BlockStop(0),
        *text(1, "plain"),
    )
    thinking, plain = of_type(published, BlockComplete)
    assert thinking.signature == "s"
    assert thinking.opaque == {"item_id": "rs_1", **ORIGIN}
    assert thinking.opaque_blobs == {"redacted": "sha256:5"}, "a large value lies in its blob, and not in the event"
    assert (plain.opaque, plain.opaque_blobs) == (None, None), "what has nothing to go back says nothing"


def test_data_after_a_blocks_end_is_published_with_the_runs_end_and_sent_back() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "Hm."), n.BlockStop(0), *text(1, "Yes."))
    story.provider(n.Opaque(0, "reasoning_details", "[1]"), n.Opaque(0, "encrypted", "e", "sha256:6"), n.Done("stop"))
    [end] = of_type(story.events, RunEnd)
    assert end.provider_extra == [
        {"block": 0, "opaque": {"reasoning_details": "[1]", **ORIGIN}, "opaque_blobs": {"encrypted": "sha256:6"}}
    ]
    [message] = Response.of(story.events).messages
    assert message.content[0] == ThinkingPart(
        text="Hm.", opaque={"reasoning_details": "[1]", **ORIGIN}, opaque_blobs={"encrypted": "sha256:6"}
    )


def test_what_a_retry_made_void_is_in_no_message() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "thinking"), n.BlockStop(0), *item(1, "x.item", "1"))
    story.provider(n.Opaque(0, "reasoning_details", "[1]"), BROKEN)
    story.provider(START, *text(0, "Yes."), *item(1, "x.item", "2"), n.Done("stop"))
    [message] = Response.of(story.events).messages
    assert message.content == [TextPart(text="Yes."), ExtraPart(name="x.item", json="2")]


def test_a_message_restarted_by_its_provider_keeps_the_origin_of_its_data() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "thinking"), n.Opaque(0, "encrypted", "old"), n.BlockStop(0))
    anew = n.Start("m", "r2", void_before=1, api="openai-responses", provider="main")
    story.provider(anew, n.BlockStart(1, "text"), n.TextDelta(1, "Yes."), n.Opaque(1, "item_id", "msg_2"))
    story.provider(n.BlockStop(1), n.Done("stop"))
    [message] = Response.of(story.events).messages
    assert message.content == [TextPart(text="Yes.", opaque={"item_id": "msg_2", **ORIGIN})]


def test_a_continued_attempt_keeps_blocks_before_its_text_and_drops_those_after() -> None:
    story = Story(on_failure="continue", continues=True)
    story.provider(START, *item(0, "x.before", "1"), n.BlockStart(1, "text"), n.TextDelta(1, "Once "))
    story.provider(*item(2, "x.after", "2"), BROKEN)
    story.provider(START, n.BlockStart(0, "text"), n.TextDelta(0, "upon"), n.BlockStop(0), n.Done("stop"))
    [message] = Response.of(story.events).messages
    assert message.content == [ExtraPart(name="x.before", json="1"), TextPart(text="Once upon")]


def test_a_cancelled_run_gives_the_published_text_and_no_cut_call_or_thought() -> None:
    story = Story()
    story.provider(START, *text(0, "So "), n.BlockStart(1, "thinking"), n.ThinkingDelta(1, "hm"))
    story.provider(n.ToolCallStart(2, "a", "f"), n.BlockStart(3, "text"), n.TextDelta(3, "far"))
    story.control(CancelRequested())
    [message] = Response.of(story.events).messages
    assert message.content == [TextPart(text="So "), TextPart(text="far")]


def test_calls_that_did_not_run_stay_open_for_the_caller() -> None:
    story = Story(max_tool_depth=0)
    story.provider(START, *call(0, "a", "f"), n.Done("tool_use"))
    [message] = Response.of(story.events).messages
    assert message.content == [ToolCallPart(tool_id="a", tool_name="f", arguments="")]


def test_the_models_messages_have_its_participants_name() -> None:
    story = Story(participant="Claude")
    story.provider(START, *text(0, "Hi."), n.Done("stop"))
    [message] = Response.of(story.events).messages
    assert message.participant == "Claude"


def test_a_value_that_is_too_large_without_a_blob_store_is_left_out_with_a_note() -> None:
    story = Story()
    large = "x" * (MAX_INLINE_CHARS + 1)
    story.provider(START, n.BlockStart(0, "thinking"), n.Opaque(0, "encrypted", large), n.BlockStop(0))
    [end] = of_type(story.events, BlockComplete)
    assert end.opaque == ORIGIN
    assert end.provider_extra == [{"note": "'encrypted' is too large to be handed on without a blob store"}]
    story.provider(*call(1, "a", "f"), n.Done("tool_use"))
    story.control(ToolReturned(1, "", False))
    [answer, _] = history(story)
    assert isinstance(part := answer.content[0], ThinkingPart)
    assert part.opaque == {"encrypted": large, **ORIGIN}, "the run's own next turn has it at hand"


@pytest.mark.parametrize("ended", [True, False])
def test_opaque_data_of_a_block_are_bounded_as_its_content_is(ended: bool) -> None:
    story = Story(rules=RunLimits(block_chars=10))
    story.provider(START, n.BlockStart(0, "thinking"), n.Opaque(0, "a", "x" * 6))
    published = story.provider(*([n.BlockStop(0)] if ended else []), n.Opaque(0, "b", "x" * 5))
    [end] = of_type(published, RunFailedEvent)
    assert end.error.code == "too_large"
    assert " characters, the limit is 10" in end.error.message


def test_a_block_begins_and_ends_once_with_opaque_data() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "text"), n.Opaque(0, "citations", "[]"), n.BlockStop(0), n.Done("stop"))
    assert len(of_type(story.events, BlockStarted)) == len(of_type(story.events, BlockComplete)) == 1


def test_an_item_of_the_providers_is_heard_while_it_happens_and_any_number_of_them() -> None:
    story = Story()
    begun = story.provider(START, n.ItemStart(0, "a.server_tool_use", "web_search", "s"), n.ToolCallDelta(0, '{"q":'))
    started, chunk = begun[-2:]
    assert isinstance(started, BlockStarted)
    assert (started.kind, started.item) == ("server_tool", "a.server_tool_use")
    assert (started.tool_name, started.tool_id) == ("web_search", "s")
    assert isinstance(chunk, Chunk)
    assert (chunk.text, chunk.visible, chunk.tool_call_part) == ('{"q":', False, None)
    [complete] = story.provider(n.ToolCallDelta(0, "1}"), n.BlockStop(0))[-1:]
    assert isinstance(complete, BlockComplete)
    assert (complete.content, complete.item, complete.tool_name) == ('{"q":1}', "a.server_tool_use", "web_search")
    story.provider(*(event for at in range(1, 151) for event in item(at, "a.b", "{}")), n.Done("stop"))
    [message] = Response.of(story.events).messages
    assert len(message.content) == 151


def test_an_item_without_its_end_is_cut_and_does_not_go_back() -> None:
    story = Story()
    story.provider(START, n.ItemStart(0, "a.b", "web_search", "s"), n.ToolCallDelta(0, '{"q":'), n.Done("stop"))
    [block] = of_type(story.events, BlockComplete)
    assert (block.cut, block.content) == (True, '{"q":')
    assert Response.of(story.events).messages == []


def test_extra_data_is_limited_by_its_size_and_says_what_is_missing() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "text"), n.TextDelta(0, "So."))
    story.provider(*(n.Extra("x.citation", f"[{i}]", 0) for i in range(150)))
    large = msgspec.json.encode("y" * 400_000).decode()
    story.provider(*(n.Extra("x.large", large, 0) for _ in range(4)), *(n.Extra("x.event", large) for _ in range(3)))
    story.provider(n.BlockStop(0), n.Done("stop"))
    [block] = of_type(story.events, BlockComplete)
    assert block.provider_extra
    assert [e["json"] for e in block.provider_extra[:150]] == [f"[{i}]" for i in range(150)]
    assert [e.get("name") for e in block.provider_extra[150:]] == ["x.large", "x.large", None]
    assert str(block.provider_extra[-1]["note"]).startswith("x.large: 2 with 8000")
    [end] = of_type(story.events, RunEnd)
    assert [e.get("name") for e in end.provider_extra] == ["x.event", "x.event", None]


def test_extra_data_costs_a_checkpoint_only_what_is_new() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "text"), n.TextDelta(0, "So."))
    checkpoints, written, pieces = Checkpoints(), 0, dict[int, bytes]()
    for i in range(50):
        story.provider(n.Extra("x.logprobs", msgspec.json.encode(f"{i:02}" * 1_000).decode(), 0))
        saved = checkpoints.save(story.run.state)
        assert saved
        pieces |= saved.new
        written += sum(map(len, saved.new.values()))
    assert written < 50 * 3_000
    restored, _ = Checkpoints.load(saved.head, pieces)
    assert restored.blocks.open[0].extras.entries() == story.run.state.blocks.open[0].extras.entries()


def test_speech_is_a_visible_transcript_with_its_sound_and_goes_back_as_text() -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "audio"), n.TranscriptDelta(0, "Hel"), n.TranscriptDelta(0, "lo"))
    story.provider(n.Audio(0, "audio/wav", "", "audio_1", 9, "sha256:7", 2), n.BlockStop(0))
    story.provider(*call(1, "a", "f"), n.Done("tool_use"))
    assert "".join(e.text for e in of_type(story.events, Chunk) if e.visible) == "Hello"
    block, _ = of_type(story.events, BlockComplete)
    sound = AudioRef(media_type="audio/wav", blob_id="sha256:7", size_bytes=2, audio_id="audio_1", expires_at=9)
    assert (block.kind, block.content, block.audio, block.opaque) == ("audio", "Hello", sound, None)
    assert blobs_of(block) == {"sha256:7"}
    response = Response.of(story.events)
    assert response.text == "Hello"
    assert response.messages[0].content[0] == TextPart(text="Hello"), "the provider soon forgets the id"
    story.control(ToolReturned(1, "", False))
    [answer, _] = history(story)
    assert answer.content[0] == TextPart(text="Hello", opaque={"audio": "audio_1", **ORIGIN})

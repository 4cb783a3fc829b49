"""A newer version may send kinds of internal events that this one does not know: they are passed over, and kept."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.core.run.state_machine import RunMachine
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    Data,
    EventFrame,
    RunLimits,
    TapedFrame,
    decode_events,
    decode_raw,
    decode_taken,
    encode,
)
from tokenbus.events.normalized import BlockStart, Done, TextDelta
from tokenbus.events.public import Completed

NEWER = ["of-a-newer-version", 1, {"more": "things"}]


def frame_of(*events: object, attempt: int = 1) -> bytes:
    return msgspec.msgpack.encode([0, attempt, 5, [*events]])


def test_an_event_of_an_unknown_kind_is_skipped_and_others_count():
    accepted = Accepted(
        provider="anthropic", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[]
    )
    run = RunMachine.accept("r", accepted, 0)
    data = frame_of(BlockStart(0, "text"), NEWER, TextDelta(0, "hello"), NEWER, Done("stop"))
    run.handle(decode_events(data))
    assert run.over
    assert isinstance(run.out.number("r", 0)[-1], Completed)


def test_what_is_not_known_is_kept_as_it_came():
    frame = decode_events(frame_of(NEWER, attempt=CONTROL_ATTEMPT))
    again = decode_taken(encode(TapedFrame(frame, 1))).frame
    assert msgspec.msgpack.decode(encode(again)) == msgspec.msgpack.decode(frame_of(NEWER, attempt=CONTROL_ATTEMPT))


def test_raw_items_of_an_unknown_kind_are_passed_over():
    data = msgspec.msgpack.encode([0, 1, 0, 5, [NEWER, ["data", b"x"]]])
    newer, known = decode_raw(data).items
    assert isinstance(newer, msgspec.Raw)
    assert known == Data(b"x")


@pytest.mark.parametrize("events", [[["text", "no block", 1]], [[]], ["text"], [[1]], 7])
def test_what_is_wrong_in_a_known_kind_is_poison_as_ever(events: object):
    with pytest.raises(msgspec.ValidationError):
        decode_events(msgspec.msgpack.encode([0, 1, 5, events]))
    assert isinstance(decode_events(msgspec.msgpack.encode([0, 1, 5, []])), EventFrame)

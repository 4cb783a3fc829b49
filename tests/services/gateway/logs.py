"""Logs of runs to feed encoders with: recorded streams, and any log that hypothesis can think of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.unit.core.run.script import Story, call, text
from tests.unit.core.run.test_run_properties import play, steps
from tests.unit.policy.streams import recorded_events
from tests.unit.providers.corpus import APIS, recordings
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import BusEvent, CancelRequested, ToolReturned
from tokenbus.events.public import TERMINAL, PublicEvent, UnknownEvent
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.surfaces.contract import Encoder, WholeAnswer

Log = list[PublicEvent]
BUSY = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
USAGE = Usage(input=9, output=5, reasoning=2, cache_read=3)
DONE = n.Done("stop", "end_turn", USAGE)
ROWS = recordings(*APIS)


def log_of(*attempts: Sequence[BusEvent], **accepted: object) -> Log:
    """The log of a run with these attempts. A result or a cancel is a list of its own."""
    story = Story(**accepted)
    for attempt in attempts:
        if isinstance(attempt[0], ToolReturned | CancelRequested):
            story.control(*attempt)
        else:
            story.provider(*attempt)
    return story.events


def thinking(block: int, *pieces: str, signature: str = "") -> list[BusEvent]:
    signed = [n.Opaque(block, "signature", signature)] if signature else []
    deltas = (n.ThinkingDelta(block, piece) for piece in pieces)
    begun = n.Start("m", "r", api="anthropic", provider="anthropic")
    return [begun, n.BlockStart(block, "thinking"), *deltas, *signed, n.BlockStop(block)]


@st.composite
def any_log(
    draw: st.DrawFn, policies: Sequence[str] = ("before_first_visible", "before_first_output", "fail", "continue")
) -> Log:
    """The log of any run: retried, cut, cancelled, unfinished, with events of a newer version."""
    plan: list[list[BusEvent] | BusEvent] = list(draw(steps))
    log = play(plan, draw(st.sampled_from(policies)), reborn=False).events
    if draw(st.booleans()):
        log = log[: draw(st.integers(1, len(log)))]
    if draw(st.booleans()):
        at = draw(st.integers(1, len(log) - isinstance(log[-1], TERMINAL)))
        unknown = UnknownEvent(run=log[0].run, seq=at, turn=log[at - 1].turn, attempt=1, event_type="new", fields={})
        log = [*log[:at], unknown, *(msgspec.structs.replace(event, seq=event.seq + 1) for event in log[at:])]
    return log


def visible_text(log: Log) -> str:
    """The text of the run's blocks that are not void, in order."""
    return "".join(block.content or "" for block in Response.of(log).blocks if block.kind == "text")


def streamed(encoder: Encoder, log: Log) -> bytes:
    """Everything that the encoder emits."""
    return b"".join(data for event in log for data in encoder.feed(event))


def answered(whole: WholeAnswer, log: Log) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a log that ends."""
    answers = [answer for event in log if (answer := whole.feed(event))]
    assert len(answers) == 1
    return answers[0].status, msgspec.json.decode(answers[0].body)


__all__ = ["call", "recorded_events", "text"]

"""What every run of the model does: a text, a tool call, and an answer after its result."""

from __future__ import annotations

from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    CancelRequested,
    Data,
    Ended,
    EventFrame,
    Opened,
    RawItem,
    RunLimits,
    ToolReturned,
    TurnWork,
    encode,
)
from tokenbus.events.quirks import Quirks

TOOL = "look"
TTL_MS = 600_000

_CALLED = b'{"index":0,"id":"call_1","type":"function","function":{"name":"look","arguments":"{}"}}'


def _chunk(delta: bytes, finish: bytes = b"null") -> bytes:
    return b'data: {"id":"x","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}\n\n' % (delta, finish)


def frames_of(turn: int) -> list[list[RawItem]]:
    """What a fetcher writes of this turn, frame by frame; the last one ends it."""
    opened = Opened("openai-chat", 200, {"content-type": "text/event-stream"}, True, Quirks())
    chunks = [_chunk(b'{"role":"assistant","content":"turn %d "}' % turn), _chunk(b'{"content":"says this"}')]
    last = (
        [_chunk(b'{"tool_calls":[%s]}' % _CALLED), _chunk(b"{}", b'"tool_calls"')]
        if turn == 0
        else [_chunk(b"{}", b'"stop"')]
    )
    *rest, end = [Data(data) for data in (*chunks, *last)]
    return [[opened], *([item] for item in rest), [end, Data(b"data: [DONE]\n\n"), Ended()]]


TEXTS = ("turn 0 says this", "turn 1 says this")
"""The published output of an undisturbed run."""


def accepted() -> bytes:
    """The first event of a run. Lost attempts are always tried again."""
    rules = RunLimits(max_attempts=1000, max_losses=1000)
    return encode(
        EventFrame(
            0,
            CONTROL_ATTEMPT,
            0,
            [Accepted(provider="p", model="m", on_failure="restart", max_tool_depth=4, rules=rules, tools=[TOOL])],
        )
    )


def first_turn(run: str) -> bytes:
    """The work that intake hands out."""
    return encode(TurnWork(run, 0, 1))


def cancel_asked() -> bytes:
    """A cancel, as in `events`."""
    return encode(EventFrame(0, CONTROL_ATTEMPT, 0, [CancelRequested("enough")]))


def result(turn: int, block: int) -> bytes:
    """A tool's result, as in `events`."""
    return encode(EventFrame(turn, CONTROL_ATTEMPT, 0, [ToolReturned(block, "found", is_error=False)]))

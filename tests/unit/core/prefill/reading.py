"""Runs `TextReader` over text in pieces, and puts what it says together again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tests.unit.core.prefill.reference import Region
from tokenbus.core.prefill.parser import TextReader
from tokenbus.events import normalized as n
from tokenbus.events.frames import TextReading

LIMIT = 2**24


def reader(inside: str = "", **setting: Any) -> TextReader:
    return TextReader.start("r1/0", TextReading(**setting), LIMIT, inside)


def read(pieces: Iterable[str], inside: str = "", **setting: Any) -> list[n.Normalized]:
    """All events of a turn."""
    reading = reader(inside, **setting)
    events = [event for piece in pieces for event in reading.feed(piece)]
    return events + reading.end()


def joined(events: Iterable[n.Normalized]) -> list[n.Normalized]:
    """Neighbouring pieces of one block as one."""
    out: list[n.Normalized] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case n.TextDelta(), n.TextDelta() if last.block == event.block:
                out[-1] = n.TextDelta(last.block, last.text + event.text)
            case n.ThinkingDelta(), n.ThinkingDelta() if last.block == event.block:
                out[-1] = n.ThinkingDelta(last.block, last.text + event.text)
            case n.ToolCallDelta(), n.ToolCallDelta() if last.block == event.block:
                out[-1] = n.ToolCallDelta(last.block, last.fragment + event.fragment)
            case _:
                out.append(event)
    return out


def regions(events: Iterable[n.Normalized]) -> list[Region]:
    """The blocks, as the reference has them. Asserts that each starts, is written and ends, one after the other."""
    blocks: list[Region] = []
    is_open = False
    for event in events:
        match event:
            case n.BlockStart():
                assert not is_open
                blocks.append(Region(event.kind))
                is_open = True
            case n.ToolCallStart():
                assert not is_open
                blocks.append(Region("tool_call", name=event.name))
                is_open = True
            case n.TextDelta() | n.ThinkingDelta():
                assert event.block == len(blocks) - 1
                assert event.text
                blocks[-1].content += event.text
            case n.ToolCallDelta():
                blocks[-1].content += event.fragment
            case n.BlockStop() | n.ToolCallDone():
                assert is_open
                assert event.block == len(blocks) - 1
                is_open = False
                if isinstance(event, n.ToolCallDone):
                    blocks[-1].malformed = bool(event.problem)
            case _:
                raise AssertionError(event)
    assert not is_open
    return blocks


def same(found: list[Region], wanted: list[Region]) -> bool:
    """Calls are compared by content: a malformed one must not run, for any input."""
    if len(found) != len(wanted):
        return False
    for one, other in zip(found, wanted, strict=True):
        if (one.kind, one.name, one.malformed) != (other.kind, other.name, other.malformed):
            return False
        if one.kind != "tool_call":
            if one.content != other.content:
                return False
        elif not one.malformed and msgspec.json.decode(one.content) != other.input:
            return False
    return True

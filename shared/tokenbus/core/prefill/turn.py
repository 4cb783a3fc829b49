"""A turn in prefill mode: what a decoder's events mean there, and how often a provider is asked to go on within it."""

from __future__ import annotations

import msgspec

from tokenbus.core.prefill.parser import TextReader
from tokenbus.core.prefill.tag_scanner import BLANKS
from tokenbus.events import normalized as n
from tokenbus.events.frames import TextReading

MAX_RESUMPTIONS = 24
"""How often one turn may be resumed after a provider stopped on a string inside thinking or a parameter."""
MAX_IDLE = 3
"""How many resumptions in a row may bring nothing."""


class TurnText(msgspec.Struct):
    """The text of one turn, and the provider's own regions beside it (thinking, images), which take no part in it."""

    run: str
    turn: int
    setting: TextReading
    limit: int
    reader: TextReader
    beside: list[int] = []
    """Open regions of the provider's own, by the decoder's ordinal."""
    resumed: int = 0
    idle: int = 0
    progress: bool = False
    """Text came since the provider was last asked."""

    @classmethod
    def start(cls, run: str, turn: int, setting: TextReading, limit: int, inside: str) -> TurnText:
        """A turn begins, at the top or inside a thinking of this name."""
        return cls(run, turn, setting, limit, TextReader.start(f"{run}/{turn}", setting, limit, inside))

    def again(self, setting: TextReading | None = None) -> TurnText:
        """The same turn from its beginning; ``setting``: in place of the present one, for another provider."""
        return TurnText.start(self.run, self.turn, setting or self.setting, self.limit, self.reader.began)

    def following(self) -> TurnText:
        """The next turn. Where a call interrupted thinking, the thinking goes on."""
        return TurnText.start(self.run, self.turn + 1, self.setting, self.limit, self.reader.thinking)

    def read(self, event: n.Normalized) -> list[n.Normalized]:
        """What the decoder's event means: text is read, what the provider adds of its own takes ordinals below 0."""
        match event:
            case n.TextDelta() | n.RefusalDelta():
                self.progress = True
                return self.reader.feed(event.text)
            case n.BlockStart():
                if event.kind == "text":
                    return []
                self.beside.append(event.block)
            case n.BlockStop():
                if event.block not in self.beside:
                    return []
                self.beside.remove(event.block)
            case n.ToolCallStart():
                # No tool was offered this way, so nobody is to run it.
                return [n.Extra("prefill.native_call", msgspec.json.encode({"name": event.name}).decode())]
            case n.ToolCallDelta() | n.ToolCallDone():
                return []
            case n.Extra():
                return [n.Extra(event.name, event.json)]
            case n.ThinkingDelta() | n.Image() | n.Opaque():
                if event.block not in self.beside:
                    return []
            case _:
                return [event]
        return [msgspec.structs.replace(event, block=-1 - event.block)]

    def put_back(self, string: str) -> list[n.Normalized]:
        """The provider stopped on this string, and keeps it to itself.

        Where the turn goes on after it, blank space at its end stays away: providers refuse to go on from there.
        """
        inside = self.reader.place != "top"
        return self.reader.feed(string.rstrip(BLANKS) if inside else string)

    def resumes(self) -> bool:
        """Whether the provider is asked once more to go on; counts that it is."""
        self.idle = 0 if self.progress else self.idle + 1
        if self.resumed >= MAX_RESUMPTIONS or self.idle >= MAX_IDLE:
            return False
        self.resumed += 1
        self.progress = False
        return True

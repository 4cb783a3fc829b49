"""A turn in prefill mode: maps a decoder's events, and counts how often the provider is asked to continue."""

from __future__ import annotations

import msgspec

from tokenbus.core.prefill.parser import TextReader
from tokenbus.core.prefill.tag_scanner import BLANKS
from tokenbus.events import normalized as n
from tokenbus.events.frames import TextReading

MAX_RESUMPTIONS = 24
"""Maximum resumptions of one turn after a provider stopped on a string inside thinking or a parameter."""
MAX_IDLE = 3
"""Maximum resumptions in a row without progress."""


class TurnText(msgspec.Struct):
    """Text of one turn, and the provider's own blocks beside it (thinking, images), which are not part of the text."""

    run: str
    turn: int
    setting: TextReading
    limit: int
    reader: TextReader
    beside: list[int] = []
    """Open blocks of the provider, by the decoder's ordinal."""
    resumed: int = 0
    idle: int = 0
    progress: bool = False
    """Whether text has arrived since the provider was last asked."""

    @classmethod
    def start(cls, run: str, turn: int, setting: TextReading, limit: int, inside: str) -> TurnText:
        """Start a turn at top level or inside a thinking block with this name."""
        return cls(run, turn, setting, limit, TextReader.start(f"{run}/{turn}", setting, limit, inside))

    def again(self, setting: TextReading | None = None) -> TurnText:
        """The same turn from its start; ``setting`` replaces the current one, for another provider."""
        return TurnText.start(self.run, self.turn, setting or self.setting, self.limit, self.reader.began)

    def read_as(self, setting: TextReading | None) -> list[n.Normalized]:
        """Read the rest of the turn as another provider marks it; None: as before. Returns what was held back as the
        beginning of a mark that no longer counts.
        """
        self.setting = setting or self.setting
        return self.reader.read_as(self.setting)

    def following(self) -> TurnText:
        """The next turn. If a call interrupted thinking, it continues inside that thinking."""
        return TurnText.start(self.run, self.turn + 1, self.setting, self.limit, self.reader.thinking)

    def read(self, event: n.Normalized) -> list[n.Normalized]:
        """Map a decoder's event: text is parsed; the provider's own blocks get ordinals below 0."""
        match event:
            case n.TextDelta() | n.RefusalDelta():
                self.progress = True
                return self.reader.feed(event.text)
            case n.BlockStart() | n.ItemStart():
                if isinstance(event, n.BlockStart) and event.kind == "text":
                    return []
                self.beside.append(event.block)
            case n.BlockStop():
                if event.block not in self.beside:
                    return []
                self.beside.remove(event.block)
            case n.ToolCallStart():
                # Prefill mode offers no native tools, so no executor runs this call.
                return [n.Extra("prefill.native_call", msgspec.json.encode({"name": event.name}).decode())]
            case n.ToolCallDone() | n.ApprovalAsked():
                return []
            case n.Extra():
                return [n.Extra(event.name, event.json)]
            case (
                n.ThinkingDelta()
                | n.ToolCallDelta()
                | n.ItemProgress()
                | n.TranscriptDelta()
                | n.Image()
                | n.Audio()
                | n.Opaque()
            ):
                if event.block not in self.beside:
                    return []
            case _:
                return [event]
        return [msgspec.structs.replace(event, block=-1 - event.block)]

    def put_back(self, string: str) -> list[n.Normalized]:
        """Feed the string on which the provider stopped, and which it does not send.

        If the turn continues after it, trailing whitespace is dropped: providers refuse to continue from whitespace.
        """
        inside = self.reader.place != "top"
        return self.reader.feed(string.rstrip(BLANKS) if inside else string)

    def resumes(self) -> bool:
        """Whether to ask the provider to continue again; counts the request."""
        self.idle = 0 if self.progress else self.idle + 1
        if self.resumed >= MAX_RESUMPTIONS or self.idle >= MAX_IDLE:
            return False
        self.resumed += 1
        self.progress = False
        return True

"""Thinking that a model writes into its text, as ``<think>…</think>``: found there, and given as blocks of its own.

Some vendors pass a model's text on as it wrote it; which tags hold thinking there is data (`Quirks.inline_thinking`).
Their decoders give every event to an `InlineThinking`, which cuts a text into pieces of text and of thinking, each a
block, and lets all else pass. Ordinals are spread on the way: the pieces have room, and everything keeps its order.

- A tag is ``<name>`` or ``</name>``, with blanks before the ``>`` or without, 256 characters at the most. Case matters.
- ``<`` holds back what may become a tag. As soon as it cannot, it is text, up to the next ``<``.
- Inside of thinking only its own close is a tag. Outside, a close is as if not written.
- Blanks alone beside a tag make no block; before real text they belong to it. More than 256 of them are text too.
- Thinking that is open when its text ends (a tool call comes, say) goes on in the next text, to its close or for good.
- With `Quirks.unclosed_thinking` `release` thinking waits for its close, or until there is too much of it. Where a call
  or an image comes first, or the answer ends soundly, it was none, and is text. Cut off, it is thinking.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    Normalized,
    Opaque,
    RefusalDelta,
    Start,
    TextDelta,
    ThinkingDelta,
    ToolCallStart,
    UsageSeen,
)
from tokenbus.events.quirks import Quirks

MAX_HELD_CHARS = 256
"""Longest tag, and most blanks that are kept until it is known whether text follows."""
MAX_UNCLOSED_CHARS = 256 * 1024
"""Most that waits for its close; with more it is thinking, as its tag says."""
MAX_BESIDE = 100
"""Most events that wait with it; with more it is thinking, too."""
_APART = 2**32
"""How far neighbouring ordinals of the decoder are spread. A text with more pieces would take many gigabytes."""
_BLANK = " \t\r\n"


class _Tags(NamedTuple):
    """The tags that count at a place, and how each begins."""

    pattern: re.Pattern[str]
    stems: tuple[str, ...]

    def may_begin_at(self, text: str, at: int) -> bool:
        """Whether what the text ends with, from this ``<`` on, may become a tag."""
        if len(text) - at >= MAX_HELD_CHARS:
            return False
        tail = text[at:]
        return any(
            stem.startswith(tail) or (tail.startswith(stem) and not tail[len(stem) :].strip(_BLANK))
            for stem in self.stems
        )


class _Text(msgspec.Struct):
    """A text block of the decoder that is open."""

    first: int
    """Ordinal of its first piece."""
    inside: str
    """The name of the tag that its thinking began with; empty outside of any."""
    tagged: bool
    """There was a tag in it, or it goes on inside of one."""
    pieces: int = 0
    is_open: bool = False
    """Its last piece is."""
    held: str = ""
    """The beginning of a tag, it may be."""
    blank: str = ""
    """Blanks before a piece, until it is known whether there is one."""
    waiting: list[str] = []
    """Thinking that waits for its close."""
    waits: int = 0
    """Characters of it."""
    beside: list[Opaque | Extra] = []
    """What belongs to it, and waits with it."""

    @property
    def last(self) -> int:
        """Ordinal of its last piece; -1: it has none."""
        return self.first + self.pieces - 1 if self.pieces else -1


class InlineThinking(msgspec.Struct):
    """Events of one attempt in, the same with the thinking taken out of the text. Its fields are its whole state.

    In time linear in the text, and the same however it came in pieces, once neighbouring pieces are joined.
    """

    names: tuple[str, ...]
    begins_inside: str = ""
    """The tag that the prompt itself opened."""
    inside: str = ""
    """The tag that the next text goes on inside of."""
    open: dict[int, _Text] = {}
    """By the decoder's ordinal."""
    ended: int = -1
    """The text that ended last, by the decoder's ordinal: something may still come of it."""
    ended_at: int = -1
    """Ordinal of its last piece."""
    releases: bool = False
    """Thinking without a close may turn out to be text."""
    undecided: _Text | None = None
    """A text that ended while its thinking waited."""

    @classmethod
    def of(cls, quirks: Quirks) -> InlineThinking | None:
        """For a vendor that writes thinking into the text; None for all others."""
        if not quirks.inline_thinking:
            return None
        first = quirks.inline_thinking[0] if quirks.inline_thinking_opened else ""
        return cls(quirks.inline_thinking, first, first, releases=quirks.unclosed_thinking == "release")

    def split(self, events: list[Normalized]) -> list[Normalized]:
        """The events as their reader gets them."""
        out: list[Normalized] = []
        for event in events:
            self._take(event, out)
        return out

    def _take(self, event: Normalized, out: list[Normalized]) -> None:
        match event:
            case TextDelta():
                self._read(self.open[event.block], event.text, out)
            case RefusalDelta():
                self._refuse(self.open[event.block], event.text, out)
            case BlockStart() if event.kind == "text":
                text = _Text(event.block * _APART, self.inside, tagged=bool(self.inside))
                if self.undecided:
                    text.waiting, text.waits = self.undecided.waiting, self.undecided.waits
                    text.beside = self.undecided.beside
                self.open[event.block], self.inside, self.undecided = text, "", None
            case BlockStop() if event.block in self.open:
                self._end(event.block, out)
            case Opaque() | Extra() if waiting := self._waiting(event.block):
                self._put_beside(waiting, event, out)
            case Opaque():
                if (ordinal := self._whereabouts(event.block, out)) >= 0:
                    out.append(msgspec.structs.replace(event, block=ordinal))
            case Extra():
                ordinal = -1 if event.block is None else self._whereabouts(event.block, out)
                at = event.ordinal * _APART if event.ordinal >= 0 else -1
                out.append(msgspec.structs.replace(event, block=ordinal if ordinal >= 0 else None, ordinal=at))
            case Start():
                self.open.clear()
                self.inside, self.ended, self.undecided = self.begins_inside, -1, None
                out.append(msgspec.structs.replace(event, void_before=event.void_before * _APART))
            case Done() | Failed() | Cut():
                for text in self.open.values():
                    self._release(text, out)
                    self._think(text, out)
                self._decide(out, said=isinstance(event, Done) and event.finish in ("stop", "tool_use"))
                out.append(event)
            case UsageSeen():
                out.append(event)
            case _:
                if isinstance(event, ToolCallStart | BlockStart):
                    self._decide(out, said=not (isinstance(event, BlockStart) and event.kind == "thinking"))
                out.append(msgspec.structs.replace(event, block=event.block * _APART))

    def _end(self, number: int, out: list[Normalized]) -> None:
        text = self.open.pop(number)
        self._release(text, out)
        if text.blank and not text.tagged:
            self._appear(text, out)
        if text.waiting:
            self._decide(out, said=False)  # of another text that was open beside it
            self.undecided = text
        else:
            self._shut(text, out)
        self.inside = text.inside or self.inside
        self.ended, self.ended_at = number, text.last

    def _decide(self, out: list[Normalized], *, said: bool) -> None:
        """What waited for its close will have none: it was ``said``, or it is thinking."""
        text, self.undecided = self.undecided, None
        if text is None:
            return
        if said:
            waiting, text.waiting, text.inside, self.inside = "".join(text.waiting), [], "", ""
            self._say(text, waiting, out)
        self._shut(text, out)
        self.ended_at = text.last

    def _think(self, text: _Text, out: list[Normalized]) -> None:
        """What waits for its close is thinking."""
        if text.waiting:
            waiting, text.waiting = "".join(text.waiting), []
            self._write(text, waiting, out)

    def _put_beside(self, text: _Text, event: Opaque | Extra, out: list[Normalized]) -> None:
        if isinstance(event, Extra) and event.ordinal >= 0:
            event = msgspec.structs.replace(event, ordinal=event.ordinal * _APART)
        text.beside.append(event)
        if len(text.beside) > MAX_BESIDE:
            self._think(text, out)

    def _waiting(self, number: int | None) -> _Text | None:
        """The text of this number, where its thinking waits for its close."""
        text = self.undecided if number == self.ended else self.open.get(-1 if number is None else number)
        return text if text and text.waiting else None

    def _whereabouts(self, number: int, out: list[Normalized]) -> int:
        """Where a block of the decoder is, a text by its last piece; an open one gets a piece for it. -1: nowhere."""
        if text := self.open.get(number):
            if not text.pieces:
                self._appear(text, out)
            return text.last
        return self.ended_at if number == self.ended else number * _APART

    def _read(self, text: _Text, new: str, out: list[Normalized]) -> None:
        whole = text.held + new
        tags = _tags_of(self.names, text.inside)
        said = at = 0
        while tag := tags.pattern.search(whole, at):
            at = tag.end()
            if at - tag.start() > MAX_HELD_CHARS:
                continue
            self._say(text, whole[said : tag.start()], out)
            said = at
            text.tagged = True
            if text.inside or not tag[1]:
                self._shut(text, out)
                text.inside = "" if text.inside else tag[2]
                tags = _tags_of(self.names, text.inside)
        hold = whole.rfind("<", said)
        if hold < 0 or not tags.may_begin_at(whole, hold):
            hold = len(whole)
        self._say(text, whole[said:hold], out)
        text.held = whole[hold:]

    def _refuse(self, text: _Text, refusal: str, out: list[Normalized]) -> None:
        """A refusal is no place for tags, and no thinking."""
        self._release(text, out)
        if text.inside:
            self._shut(text, out)
            text.inside = ""
        if not text.is_open:
            self._appear(text, out)
        out.append(RefusalDelta(text.last, refusal))

    def _release(self, text: _Text, out: list[Normalized]) -> None:
        """Nothing more comes: what was held back is no tag."""
        held, text.held = text.held, ""
        self._say(text, held, out)

    def _say(self, text: _Text, part: str, out: list[Normalized]) -> None:
        """Something between tags, or a part of it."""
        if not (self.releases and text.inside) or text.is_open:
            self._write(text, part, out)
        elif part:
            text.waiting.append(part)
            text.waits += len(part)
            if text.waits > MAX_UNCLOSED_CHARS:
                self._think(text, out)

    def _write(self, text: _Text, part: str, out: list[Normalized]) -> None:
        if not text.is_open:
            text.blank += part
            if len(text.blank) > MAX_HELD_CHARS or text.blank.strip(_BLANK):
                self._appear(text, out)
        elif part:
            out.append(ThinkingDelta(text.last, part) if text.inside else TextDelta(text.last, part))

    def _appear(self, text: _Text, out: list[Normalized]) -> None:
        """A piece begins, with the blanks before it."""
        text.pieces += 1
        text.is_open = True
        out.append(BlockStart(text.last, "thinking" if text.inside else "text"))
        kept, text.blank = text.blank, ""
        self._write(text, kept, out)
        out += [msgspec.structs.replace(event, block=text.last) for event in text.beside]
        text.beside = []

    def _shut(self, text: _Text, out: list[Normalized]) -> None:
        """What is open ends, and blanks alone are nothing."""
        self._think(text, out)
        text.waits = 0
        if text.is_open:
            out.append(BlockStop(text.last))
        text.is_open, text.blank = False, ""


@lru_cache(maxsize=64)
def _tags_of(names: tuple[str, ...], inside: str) -> _Tags:
    """Inside of thinking its own close; outside the open and the close of each name."""
    counted, slash = ((inside,), "/") if inside else (names, "/?")
    pattern = re.compile(f"<({slash})({'|'.join(map(re.escape, counted))})[{_BLANK}]*>")
    stems = [f"</{name}" for name in counted]
    if not inside:
        stems += [f"<{name}" for name in counted]
    return _Tags(pattern, tuple(stems))
